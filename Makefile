# idem: build, install and test.
#
#   make                   build against the pg_config in PATH (or PG_CONFIG=...)
#   make install           install into that PostgreSQL
#   make installcheck      run the regression and isolation tests against a
#                          running server (PGHOST, PGPORT, PGUSER... as usual)
#
# These need no installation and no server; they make private ones:
#
#   make deps              install what building and testing need (Debian)
#   make check             run all tests (TIERS=... TESTS=...; see test/run)
#   make check-versions    the same on other PostgreSQL builds (see test/versions)
#   make demo              see it work
#   make bench             measure it

EXTENSION = idem
EXTVERSION := $(shell sed -n "s/^default_version *= *'\(.*\)'.*/\1/p" idem.control)
MODULE_big = idem
PGFILEDESC = "idem - idempotency for PostgreSQL"

OBJS = \
	src/idem.o \
	src/guc.o \
	src/catalog.o \
	src/input.o \
	src/statement.o \
	src/durable.o \
	src/unique.o \
	src/consumer.o \
	src/inbox.o \
	src/key.o \
	src/version.o \
	src/digest.o \
	src/payload.o \
	src/outbox.o \
	src/secret.o \
	src/server.o \
	src/route.o \
	src/stat.o \
	src/worker.o \
	src/wake.o \
	src/log.o \
	src/link.o \
	src/parked.o \
	src/replay.o \
	src/delivery.o \
	src/segment.o \
	src/relay_stat.o \
	src/declared.o \
	src/backlog.o \
	src/store.o \
	src/take.o \
	src/settle.o \
	src/work.o \
	src/handler.o \
	src/local.o \
	src/launcher.o \
	src/database.o \
	src/sweep.o \
	src/retention.o \
	src/relay.o

# The extension script is the concatenation of these, in this order.
SQL_PARTS = \
	src/idem.sql \
	src/consumer.sql \
	src/inbox.sql \
	src/key.sql \
	src/version.sql \
	src/stat.sql \
	src/outbox.sql \
	src/server.sql \
	src/route.sql \
	src/log.sql \
	src/relay.sql \
	src/replay.sql \
	src/work.sql \
	src/retention.sql \
	src/stuck.sql \
	src/roles.sql

DATA_built = $(EXTENSION)--$(EXTVERSION).sql

# Couriers: src/courier/NAME.c and NAME_*.c become idem-courier-NAME; schemes in
# courier_schemes_NAME get links to it.  courier_libs_NAME are the libraries it
# needs, for pkg-config; where they are missing, it is left out.
COURIERS = discard http amqp kafka nats redis
courier_libs_http = libcurl >= 7.80 libcrypto
courier_libs_amqp = librabbitmq >= 0.8 libssl libcrypto
courier_libs_kafka = rdkafka >= 1.9
courier_libs_nats = libnats >= 3.4
# hiredis has TLS in a library of its own, if at all
courier_libs_redis = hiredis >= 0.14 $(shell pkg-config --exists hiredis_ssl && echo hiredis_ssl libssl libcrypto)
courier_schemes_http = https
courier_schemes_amqp = amqps
courier_schemes_kafka = kafkas
courier_schemes_nats = natss
courier_schemes_redis = rediss

# Tests, tier by tier.  sql/NAME.sql, test/isolation/specs/NAME.spec,
# test/pgtap/NAME.sql and test/tap/NAME.pl.
REGRESS = inbox_claim inbox_alone input consumer key version server route outbox relay work
ISOLATION = claim_commit claim_rollback claim_isolation claim_nowait \
	claim_deadlock claim_batch claim_consumer claim_purge consumer_retention \
	outbox_dedup key_race key_lease key_wait key_snapshot version_race version_next version_reset serializable \
	work_key work_skip work_late work_redrive
PGTAP = surface roles
TAP = 010_crash 020_durable 030_dump 040_standby 050_prepared 060_retention \
	070_stat 080_worker 081_worker_limits 085_hostile 090_readme \
	110_courier 120_amqp 125_amqp_relay 130_server 140_http 142_kafka 143_kafka_relay \
	145_nats 146_redis \
	150_relay 155_replay 156_trouble 157_faults 158_evil_courier 160_relay_life 165_clock 170_copies 175_adopted 190_soak 195_upgrade \
	200_handler 205_handler_life 210_local 215_marks

ISOLATION_OPTS = --inputdir=test/isolation

PG_CONFIG ?= pg_config

# Our own goals are scripts.  They do without PGXS, because on a fresh machine
# there is none yet, and because PGXS has a `check' of its own that only says
# that it is not supported.
OWN_GOALS = deps check check-versions demo bench
ifneq (,$(filter $(OWN_GOALS) print-%,$(MAKECMDGOALS)))

ifneq (,$(filter-out $(OWN_GOALS) print-%,$(MAKECMDGOALS)))
$(error $(filter $(OWN_GOALS),$(MAKECMDGOALS)) cannot be combined with other goals; run make twice)
endif

.PHONY: $(OWN_GOALS)

deps:
	@test/deps

check:
	@test/run

check-versions:
	@test/versions

demo:
	@test/demo/run

bench:
	@test/bench/run

# lets the scripts read the lists above
print-%:
	@echo $($*)

else # PGXS

PGXS := $(shell $(PG_CONFIG) --pgxs 2>/dev/null)
ifeq (,$(wildcard $(PGXS)))
$(error No PostgreSQL server development files found ($(PG_CONFIG) --pgxs). Run "make deps", or set PG_CONFIG=/path/to/pg_config)
endif

# The server's headers are not clean under -Wextra; as system headers they
# are exempt, while our own code is not.
PG_CPPFLAGS = -isystem $(shell $(PG_CONFIG) --includedir-server)
# Test builds have places at which something can be made to go wrong.
ifdef IDEM_FAULTS
PG_CPPFLAGS += -DIDEM_FAULTS
OBJS += src/fault.o
endif
PG_CFLAGS = -Wall -Wextra $(if $(WERROR),-Werror)

# A PostgreSQL built with LLVM wants bitcode made by the very clang it was
# configured with.  Do without, if that is not here.
ifeq (,$(shell command -v $(shell sed -n 's/^CLANG[[:space:]]*=//p' $(dir $(PGXS))../Makefile.global)))
override with_llvm = no
endif

include $(PGXS)

$(OBJS) $(OBJS:.o=.bc): $(wildcard src/*.h)

$(DATA_built): $(SQL_PARTS) idem.control
	cat $(SQL_PARTS) > $@.tmp && mv $@.tmp $@

# PGXS builds no programs beside a module, so these are our own rules.
COURIER_BASE = $(addprefix src/courier/,courier.o frame.o order.o address.o header.o list.o url.o)
COURIER_CFLAGS = -std=gnu99 -O2 -g -Wall -Wextra $(if $(WERROR),-Werror) -fPIE -fstack-protector-strong

courier_found = $(wildcard src/courier/$(1).c)$(if $(courier_libs_$(1)),$(if \
	$(shell pkg-config --print-errors '$(courier_libs_$(1))' >/dev/null 2>&1 && echo yes),,-no))
COURIERS_BUILT := $(foreach c,$(COURIERS),$(if $(filter src/courier/$(c).c,$(call courier_found,$(c))),$(c)))
COURIER_PROGRAMS = $(COURIERS_BUILT:%=idem-courier-%)
COURIER_LINKS = $(foreach c,$(COURIERS_BUILT),$(courier_schemes_$(c):%=idem-courier-%))

all: couriers
install: install-couriers
uninstall: uninstall-couriers
clean: clean-couriers

.PHONY: couriers install-couriers uninstall-couriers clean-couriers

couriers: $(COURIER_PROGRAMS)
	@$(foreach c,$(filter-out $(COURIERS_BUILT),$(COURIERS)),$(if $(wildcard src/courier/$(c).c),\
		echo "idem-courier-$(c) is left out: no $(courier_libs_$(c))";)):

$(COURIER_BASE) $(patsubst %.c,%.o,$(foreach c,$(COURIERS),$(wildcard src/courier/$(c).c src/courier/$(c)_*.c))): $(wildcard src/courier/*.h)

# of a file, by its name: the courier that it belongs to
courier_of = $(firstword $(subst _, ,$(1)))
courier_objects = src/courier/$(1).o $(patsubst %.c,%.o,$(wildcard src/courier/$(1)_*.c))

src/courier/%.o: src/courier/%.c
	$(CC) $(COURIER_CFLAGS) $(if $(courier_libs_$(call courier_of,$*)),$(shell pkg-config --cflags '$(courier_libs_$(call courier_of,$*))')) -c -o $@ $<

.SECONDEXPANSION:
$(COURIER_PROGRAMS): idem-courier-%: $$(call courier_objects,$$*) $(COURIER_BASE)
	$(CC) -pie $(COURIER_LDFLAGS) -o $@ $^ $(if $(courier_libs_$*),$(shell pkg-config --libs '$(courier_libs_$*)'))

install-couriers: couriers
	$(MKDIR_P) '$(DESTDIR)$(bindir)'
	$(foreach c,$(COURIERS_BUILT),$(INSTALL_PROGRAM) idem-courier-$(c) '$(DESTDIR)$(bindir)/' && \
		$(foreach s,$(courier_schemes_$(c)),ln -sf idem-courier-$(c) '$(DESTDIR)$(bindir)/idem-courier-$(s)' &&)) :

uninstall-couriers:
	rm -f $(addprefix '$(DESTDIR)$(bindir)'/,$(COURIER_PROGRAMS) $(COURIER_LINKS))

clean-couriers:
	rm -f $(COURIERS:%=idem-courier-%) src/courier/*.o

endif # PGXS
