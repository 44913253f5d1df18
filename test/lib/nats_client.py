# Streams of NATS, made and read with nats-py for NatsServer.pm: reads a line of
# JSON, does what it says, answers with a line of JSON.
#
#   nats_client.py PORT [CA]
import asyncio
import base64
import json
import ssl
import sys

import nats


def stream_of(name):
    return name.replace(".", "_")


async def place(js, name):
    try:
        await js.stream_info(stream_of(name))
    except nats.js.errors.NotFoundError:
        await js.add_stream(name=stream_of(name), subjects=[name])


# Away with what is taken: the next call goes on behind it.
async def take(js, name, count):
    stream = stream_of(name)
    state = (await js.stream_info(stream)).state
    result = []
    seq = state.first_seq
    while state.messages > 0 and seq <= state.last_seq and len(result) < count:
        m = await js.get_msg(stream, seq)
        result.append({
            "headers": m.hdrs or "",
            "body": base64.b64encode(m.data or b"").decode(),
        })
        seq += 1
    if result:
        await js.purge_stream(stream, seq=seq)
    return result


async def do(port, context, what):
    url = "%s://localhost:%s" % ("tls" if context else "nats", port)
    nc = await nats.connect(url, tls=context, allow_reconnect=False, connect_timeout=10)
    try:
        js = nc.jetstream(timeout=30)
        if what["do"] == "place":
            return await place(js, what["name"])
        if what["do"] == "empty":
            return await js.purge_stream(stream_of(what["name"]))
        if what["do"] == "take":
            return await take(js, what["name"], what["count"])
        if what["do"] == "stream":
            config = what["config"]
            if config.pop("discard_new", False):
                config["discard"] = nats.js.api.DiscardPolicy.NEW
            await js.add_stream(**config)
            return None
        raise ValueError(what["do"])
    finally:
        await nc.close()


def main():
    context = ssl.create_default_context(cafile=sys.argv[2]) if len(sys.argv) > 2 else None
    for line in sys.stdin:
        try:
            answer = {"result": asyncio.run(do(sys.argv[1], context, json.loads(line)))}
        except Exception as e:
            answer = {"error": repr(e)}
        print(json.dumps(answer), flush=True)


main()
