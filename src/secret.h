/*-------------------------------------------------------------------------
 *
 * secret.h
 *		Secrets, which live in files below idem.secrets_dir.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEM_SECRET_H
#define IDEM_SECRET_H

#define IDEM_MAX_SECRET		65536
#define IDEM_MAX_SECRET_NAME	255

extern bool idem_secret_name_ok(const char *name);
extern char *idem_secret_read(const char *name, char **problem);

#endif							/* IDEM_SECRET_H */
