/*-------------------------------------------------------------------------
 *
 * kafka_parts.h
 *		The courier for Kafka: what its parts share.
 *
 * kafka.c has the messages and the producer's life, kafka_option.c the
 * options.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEM_KAFKA_H
#define IDEM_KAFKA_H

#include <librdkafka/rdkafka.h>

#include "courier.h"

/* What the options say. */
typedef struct KafkaOptions
{
	rd_kafka_conf_t *conf;		/* to be copied for each producer */
	const char *servers;		/* host:port,... */
	int			connect_timeout_ms;
	int			timeout_ms;
	bool		public_only;
} KafkaOptions;

extern KafkaOptions kafka_options;

/* kafka.c */
extern void kafka_conf_callbacks(rd_kafka_conf_t *conf);

/* kafka_option.c */
extern const char *const kafka_option_names[];
extern void kafka_read_options(IdemCourier *courier);

#endif							/* IDEM_KAFKA_H */
