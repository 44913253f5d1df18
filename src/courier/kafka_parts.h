/*-------------------------------------------------------------------------
 *
 * kafka_parts.h
 *		The courier for Kafka: what its parts share.
 *
 * kafka.c has the life of messages and of the producer, kafka_record.c what a
 * message looks like in Kafka, kafka_option.c the options.
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

/* kafka_record.c */
extern rd_kafka_topic_t *kafka_topic(rd_kafka_t *producer, const char *name);
extern void kafka_forget_topics(void);
extern rd_kafka_headers_t *kafka_headers(const IdemMessage *m);

/* kafka_option.c */
extern const char *const kafka_option_names[];
extern void kafka_read_options(IdemCourier *courier);

#endif							/* IDEM_KAFKA_H */
