# shellcheck shell=bash
# A private PostgreSQL with idem in it, for tests, demo and bench.
# No system folder is touched, and nothing runs as root.  To be sourced:
#
#   set -eu
#   . "$(dirname "$0")/lib/private.sh"
#   enter "$@"                    # go on as an unprivileged user in a private copy
#   build                         # build idem, install it into $WORK/inst
#   cluster_start main "work_mem = '8MB'" ...
#   psql -c 'CREATE EXTENSION idem'
#   cluster_stop main             # optional; the end of the script does it too
#
# After `enter':
#   WORK        the temporary folder; removed at the end, but kept if the script
#               fails (or if KEEP is set)
#   SRC         a copy of the source tree in it, and the current folder
#   PG_CONFIG   the pg_config in use, as an absolute path
#   LAST_LINE   set it to have the last word, after the clean-up
# After `build':
#   BIN         the private bin folder, first in PATH
#   PGXS_DIR    where pg_regress and the like are (.../pgxs/src)
# After `cluster_start NAME':
#   PGHOST, PGPORT, PGUSER, PGDATABASE lead to it; the log is $WORK/NAME.log

say() { printf '%s\n' "$*"; }
die() { printf '%s\n' "${0##*/}: $*" >&2; exit 1; }

# pack DIR: the source tree, without what was built, as a tar file
pack() {
	tar -C "$1" -cf - --exclude=./.git --exclude='*.o' --exclude='*.bc' --exclude='*.so' \
		--exclude=./results --exclude=./output_iso .
}

# enter ARGS...: start the calling script again with ARGS, from a copy of the
# tree in a temporary folder, as a user who may run servers.  The copy is needed
# because that user may be unable to read ours, and keeps the results of
# different builds apart.
enter() {
	if [ "${IDEM_ENTERED:-}" = "$$" ]; then
		unset IDEM_ENTERED
		WORK=$(cd "$(dirname "$0")" && while [ ! -e Makefile ]; do cd ..; done && cd .. && pwd -P)
		SRC=$WORK/src
		cd "$SRC" || exit
		trap leave EXIT
		trap 'exit 129' HUP
		trap 'exit 130' INT
		trap 'exit 143' TERM
		return
	fi

	local top script user="" as=() base
	top=$(cd "$(dirname "$0")" && while [ ! -e Makefile ]; do cd ..; done && pwd -P)
	script=$(cd "$(dirname "$0")" && pwd -P)/${0##*/}

	"$top/test/deps"
	PG_CONFIG=$(command -v "${PG_CONFIG:-pg_config}") || die "no pg_config; run make deps"

	# PostgreSQL refuses to run as root
	if [ "$(id -u)" -eq 0 ]; then
		for user in postgres nobody; do
			if id "$user" >/dev/null 2>&1; then break; fi
		done
		as=(setpriv "--reuid=$user" "--regid=$(id -g "$user")" --clear-groups --)
	fi
	as_user() { ${as[@]+"${as[@]}"} "$@"; }

	# The path must be short: that of a socket has at most 107 bytes.
	base=${TMPDIR:-/tmp}
	if [ ${#base} -gt 40 ] || ! as_user test -w "$base" -a -x "$base"; then base=/tmp; fi
	WORK=$(as_user mktemp -d "$base/idem.XXXXXX")
	as_user mkdir "$WORK/src"
	pack "$top" | as_user tar -C "$WORK/src" -xf - --no-same-owner
	if [ -n "${IDEM_KAFKA:-}" ]; then # see test/kafka
		as_user mkdir "$WORK/kafka.jars"
		tar -C "$IDEM_KAFKA" -cf - . | as_user tar -C "$WORK/kafka.jars" -xf - --no-same-owner
		IDEM_KAFKA=$WORK/kafka.jars
	fi

	# A known environment: no leftovers of make, libpq or the user's locale.
	local name
	for name in $(compgen -v PG) $(compgen -v LC_); do
		case $name in PG_CONFIG | PG_TEST_*) ;; *) unset "$name" ;; esac
	done
	unset MAKEFLAGS MFLAGS MAKEOVERRIDES MAKELEVEL GNUMAKEFLAGS LANGUAGE
	export PG_CONFIG HOME="$WORK" TMPDIR="$WORK" LANG=C.UTF-8 IDEM_ENTERED=$$
	cd "$WORK" || exit
	exec ${as[@]+"${as[@]}"} "$WORK/src${script#"$top"}" "$@"
}

# At the end, in every case: end what we started, remove what we made.
leave() {
	local rc=$?
	trap '' HUP INT TERM
	end_guarded
	stop_servers
	cd /
	case $rc${KEEP:+k} in
		0 | 129 | 130 | 143) rm -rf "$WORK" ;;
		*) say "kept: $WORK" ;;
	esac
	[ -z "${LAST_LINE:-}" ] || say "$LAST_LINE"
	exit "$rc"
}

# Stop every server whose data folder lies in $WORK, also those of TAP tests
# that were killed.
stop_servers() {
	local file pid deadline
	while IFS= read -r file; do
		pid=$(head -n 1 "$file" 2>/dev/null) || continue
		# ours, and not just somebody with the same number?
		[ "$(readlink "/proc/$pid/cwd")" = "${file%/*}" ] || continue
		kill -INT "$pid" 2>/dev/null || continue
		deadline=$((SECONDS + 10))
		while [ "$(readlink "/proc/$pid/cwd")" = "${file%/*}" ]; do
			if [ "$SECONDS" -ge "$deadline" ]; then
				kill -QUIT "$pid" 2>/dev/null || true
				deadline=$((SECONDS + 10))
			fi
			sleep 0.05
		done
	done < <(find "$WORK" -name postmaster.pid -type f 2>/dev/null)
}

# guard LOG COMMAND...: run it with its output in LOG (- for ours), and so that
# end_guarded also ends its children: they are a process group of their own.
guarded=
guard() {
	local log=$1 rc=0
	shift
	set -m
	if [ "$log" = - ]; then
		"$@" </dev/null &
	else
		"$@" </dev/null >"$log" 2>&1 &
	fi
	guarded=$!
	set +m
	wait "$guarded" || rc=$?
	guarded=
	return "$rc"
}

end_guarded() {
	[ -n "$guarded" ] || return 0
	local deadline=$((SECONDS + 20))
	kill -TERM -- "-$guarded" 2>/dev/null || true
	while kill -0 "$guarded" 2>/dev/null; do
		if [ "$SECONDS" -ge "$deadline" ]; then kill -KILL -- "-$guarded" 2>/dev/null || true; fi
		sleep 0.05
	done
	guarded=
}

# Build idem and put it into a private copy of the PostgreSQL installation.
# PostgreSQL's programs find their other files relative to their own place.  So
# they are copied to a tree of the same shape, where the rest are symlinks to the
# real files, plus idem.
build() {
	local bindir libdir sharedir inst=$WORK/inst dir

	bindir=$("$PG_CONFIG" --bindir)
	libdir=$("$PG_CONFIG" --pkglibdir)
	sharedir=$("$PG_CONFIG" --sharedir)
	BIN=$inst$bindir
	PGXS_DIR=$(cd "$(dirname "$("$PG_CONFIG" --pgxs)")/.." && pwd)
	export PATH="$BIN:$PATH"

	if ! {
		make -C "$SRC" -j "$(nproc)" all WERROR=1 IDEM_FAULTS="${IDEM_FAULTS:-}" with_llvm=no &&
			mkdir -p "$BIN" "$inst$libdir" "$inst$sharedir/extension" &&
			cp "$bindir"/* "$BIN" &&
			link_all "$libdir" "$inst$libdir" bitcode &&
			link_all "$sharedir" "$inst$sharedir" extension &&
			link_all "$sharedir/extension" "$inst$sharedir/extension" &&
			make -C "$SRC" install DESTDIR="$inst" WERROR=1 IDEM_FAULTS="${IDEM_FAULTS:-}" with_llvm=no
	} >"$WORK/build.log" 2>&1; then
		cat "$WORK/build.log" >&2
		return 1
	fi

	# A self-made PostgreSQL has no pgTAP; any packaged one will do, it is SQL.
	if [ ! -e "$inst$sharedir/extension/pgtap.control" ]; then
		dir=$(find /usr/share/postgresql/*/extension -name pgtap.control 2>/dev/null |
			sort -V | tail -n 1)
		[ -z "$dir" ] || ln -s "${dir%/*}"/pgtap* "$inst$sharedir/extension/"
	fi
}

# link_all FROM TO [EXCEPT]: symlink each entry of FROM, none of them ours
link_all() {
	local path name
	for path in "$1"/*; do
		name=${path##*/}
		case $name in
			"${3:-}" | idem | idem.* | idem--*) ;;
			*) ln -s "$path" "$2/$name" ;;
		esac
	done
}

# cluster_start NAME [SETTING...]: make a cluster with idem preloaded, start it,
# and point libpq to it.  Without arguments for it, an existing one is started as
# it is.  Settings are lines of postgresql.conf.
cluster_start() {
	local name=$1 data=$WORK/$1 setting
	shift
	if [ ! -d "$data" ]; then
		initdb -D "$data" -U postgres -A trust -N -E UTF8 --locale=C.UTF-8 >"$data.initdb.log" 2>&1 ||
			{ cat "$data.initdb.log" >&2; return 1; }
		mkdir -p "$WORK/s/$name"
		{
			echo "listen_addresses = ''"
			echo "unix_socket_directories = '$WORK/s/$name'"
			echo "shared_preload_libraries = 'idem'"
			echo "log_line_prefix = '%m [%p] %q%a '"
		} >>"$data/postgresql.conf"
	fi
	for setting in "$@"; do
		printf '%s\n' "$setting" >>"$data/postgresql.conf"
	done
	pg_ctl -D "$data" -l "$data.log" -w -t 120 start >"$data.pg_ctl.log" 2>&1 </dev/null ||
		{ cat "$data.pg_ctl.log" >&2; tail -n 20 "$data.log" >&2; return 1; }
	export PGHOST="$WORK/s/$name" PGPORT=5432 PGUSER=postgres PGDATABASE=postgres
}

# cluster_stop NAME [MODE]
cluster_stop() {
	pg_ctl -D "$WORK/$1" -m "${2:-fast}" -w -t 120 stop >/dev/null
}
