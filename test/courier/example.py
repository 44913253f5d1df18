#!/usr/bin/env python3
"""A courier in Python: appends messages to a file, one line of JSON each.

Installed as idem-courier-lines in `pg_config --bindir`, it serves

    CREATE SERVER archive FOREIGN DATA WRAPPER idem
        OPTIONS (url 'lines:', path '/var/lib/archive/events');

The protocol is described in src/courier/README.md.
"""
import base64
import json
import os
import socket
import struct
import sys

RETURNED, BLOCKED, UP, DOWN = 5, 3, 1, 2

relay = socket.socket(fileno=3)
stream = relay.makefile("rb")


class Frame:
    """Takes the body of a frame apart."""

    def __init__(self, body):
        self.body, self.at = body, 0

    def number(self, form):
        (value,) = struct.unpack_from(form, self.body, self.at)
        self.at += struct.calcsize(form)
        return value

    def bytes(self):
        length = self.number(">I")
        if length == 0xFFFFFFFF:
            return None
        value = self.body[self.at : self.at + length]
        self.at += length
        return value

    def text(self):
        value = self.bytes()
        return None if value is None else value.decode()


def string(text):
    data = text.encode()[:1024]
    return struct.pack(">I", len(data)) + data


def say(kind, body):
    relay.sendall(struct.pack(">I", len(body) + 1) + kind + body)


def state(number, reason=""):
    say(b"s", struct.pack(">BI", number, 0) + string(reason))


def main():
    path = None
    while header := stream.read(4):
        body = stream.read(struct.unpack(">I", header)[0])
        kind, frame = body[:1], Frame(body[1:])

        if kind == b"H":
            frame.number(">I")  # version of the protocol
            frame.text()  # name of the server
            options = {}
            for _ in range(frame.number(">I")):
                name = frame.text()
                options[name] = frame.text()
            path = options.get("path")
            if not path:
                state(BLOCKED, 'option "path" is required')
                return
            say(b"h", struct.pack(">I", 1) + string("idem-courier-lines 1"))

        elif kind == b"M":
            ticket = frame.number(">Q")
            line = {"id": frame.text(), "destination": frame.text(), "topic": frame.text(), "key": frame.text()}
            line["content_type"] = frame.text()
            line["headers"] = json.loads(frame.text() or "{}")
            frame.number(">Q")  # time
            frame.number(">I")  # attempt
            line["body"] = base64.b64encode(frame.bytes()).decode()
            try:
                with open(path, "a", encoding="utf-8") as file:
                    file.write(json.dumps(line) + "\n")
                    file.flush()
                    os.fsync(file.fileno())  # only then is it delivered
            except OSError as error:
                state(DOWN, error.strerror)
                say(b"o", struct.pack(">QBII", ticket, RETURNED, 0, 0) + string(error.strerror))
            else:
                state(UP)
                say(b"d", struct.pack(">IQ", 1, ticket))

        elif kind == b"Q":
            return


main()
sys.exit(0)
