/*-------------------------------------------------------------------------
 *
 * header.c
 *		Read the headers of a message, a JSON object.
 *
 * PostgreSQL has checked that it is JSON; this only takes it apart, but
 * does not rely on that.
 *
 *-------------------------------------------------------------------------
 */
#include <stdlib.h>
#include <string.h>

#include "courier.h"

static const char *
skip_space(const char *p)
{
	while (*p == ' ' || *p == '\t' || *p == '\n' || *p == '\r')
		p++;
	return p;
}

static bool
hex4(const char *p, uint32_t *code)
{
	*code = 0;
	for (int i = 0; i < 4; i++)
	{
		char		c = p[i];

		if (c >= '0' && c <= '9')
			*code = *code << 4 | (uint32_t) (c - '0');
		else if ((c | 0x20) >= 'a' && (c | 0x20) <= 'f')
			*code = *code << 4 | (uint32_t) ((c | 0x20) - 'a' + 10);
		else
			return false;
	}
	return true;
}

static char *
put_utf8(char *to, uint32_t code)
{
	if (code < 0x80)
		*to++ = (char) code;
	else if (code < 0x800)
	{
		*to++ = (char) (0xc0 | code >> 6);
		*to++ = (char) (0x80 | (code & 0x3f));
	}
	else if (code < 0x10000)
	{
		*to++ = (char) (0xe0 | code >> 12);
		*to++ = (char) (0x80 | (code >> 6 & 0x3f));
		*to++ = (char) (0x80 | (code & 0x3f));
	}
	else
	{
		*to++ = (char) (0xf0 | code >> 18);
		*to++ = (char) (0x80 | (code >> 12 & 0x3f));
		*to++ = (char) (0x80 | (code >> 6 & 0x3f));
		*to++ = (char) (0x80 | (code & 0x3f));
	}
	return to;
}

/*
 * Unescape the string that begins at p, a quote.  The result is never longer.
 * Returns what follows, or NULL.
 */
static const char *
read_string(const char *p, char *to)
{
	if (*p++ != '"')
		return NULL;
	while (*p != '"')
	{
		uint32_t	code;
		uint32_t	low;

		if ((unsigned char) *p < 0x20)
			return NULL;		/* the end, too */
		if (*p != '\\')
		{
			*to++ = *p++;
			continue;
		}
		p++;
		switch (*p++)
		{
			case '"':
				*to++ = '"';
				break;
			case '\\':
				*to++ = '\\';
				break;
			case '/':
				*to++ = '/';
				break;
			case 'b':
				*to++ = '\b';
				break;
			case 'f':
				*to++ = '\f';
				break;
			case 'n':
				*to++ = '\n';
				break;
			case 'r':
				*to++ = '\r';
				break;
			case 't':
				*to++ = '\t';
				break;
			case 'u':
				if (!hex4(p, &code) || code == 0)
					return NULL;
				p += 4;
				if (code >= 0xd800 && code < 0xdc00)
				{
					if (p[0] != '\\' || p[1] != 'u' || !hex4(p + 2, &low) ||
						low < 0xdc00 || low > 0xdfff)
						return NULL;
					p += 6;
					code = 0x10000 + ((code - 0xd800) << 10) + (low - 0xdc00);
				}
				else if (code >= 0xdc00 && code < 0xe000)
					return NULL;
				to = put_utf8(to, code);
				break;
			default:
				return NULL;
		}
	}
	*to = '\0';
	return p + 1;
}

/* The end of a value that is no string, or NULL. */
static const char *
skip_value(const char *p, char *scratch)
{
	const char *begin = p;
	int			depth = 0;

	while (*p != '\0')
	{
		if (*p == '"')
		{
			p = read_string(p, scratch);
			if (p == NULL)
				return NULL;
			continue;
		}
		if (depth == 0 && (*p == ',' || *p == '}' || *p == ']' ||
						   *p == ' ' || *p == '\t' || *p == '\n' || *p == '\r'))
			break;
		if (*p == '{' || *p == '[')
			depth++;
		else if (*p == '}' || *p == ']')
			depth--;
		p++;
	}
	return depth != 0 || p == begin ? NULL : p;
}

bool
idem_headers_each(const char *json, IdemHeader each, void *arg)
{
	const char *p;
	char	   *name;
	char	   *value;
	bool		ok = false;

	if (json == NULL)
		return true;
	name = idem_alloc(strlen(json) + 1);
	value = idem_alloc(strlen(json) + 1);
	p = skip_space(json);
	if (*p++ != '{')
		goto out;
	p = skip_space(p);
	if (*p == '}')
	{
		ok = *skip_space(p + 1) == '\0';
		goto out;
	}
	for (;;)
	{
		bool		is_null = false;

		p = read_string(skip_space(p), name);
		if (p == NULL)
			goto out;
		p = skip_space(p);
		if (*p++ != ':')
			goto out;
		p = skip_space(p);
		if (*p == '"')
			p = read_string(p, value);
		else
		{
			const char *begin = p;

			p = skip_value(p, value);
			if (p != NULL)
			{
				memcpy(value, begin, (size_t) (p - begin));
				value[p - begin] = '\0';
				is_null = strcmp(value, "null") == 0;
			}
		}
		if (p == NULL || (!is_null && !each(arg, name, value)))
			goto out;
		p = skip_space(p);
		if (*p == '}')
		{
			ok = *skip_space(p + 1) == '\0';
			goto out;
		}
		if (*p++ != ',')
			goto out;
	}
out:
	free(name);
	free(value);
	return ok;
}
