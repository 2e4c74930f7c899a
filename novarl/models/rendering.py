"""The subprocess that renders chat templates with transformers: `python -m novarl.models.rendering`.

A template is a program that comes with a model. The sandbox protects the system, but does not limit time and memory; a
process that can be killed and has a memory limit does.

    {"memory": bytes}                      -> {"ready": true}     transformers is loaded
    {"arguments": {...}, "most": N}        -> {"text": T} | {"error": [type, message]} | {"length": N} (beyond `most`)
"""

from __future__ import annotations

import contextlib
import resource

from novarl.processes.channel import Channel

_MOST_CHARACTERS = 2000


def main() -> None:
    channel = Channel()
    requests = iter(channel)
    first = next(requests)
    from transformers.utils.chat_template_utils import render_jinja_template

    with contextlib.suppress(ValueError, OSError):  # the system does not support the limit
        resource.setrlimit(resource.RLIMIT_DATA, (first["memory"], first["memory"]))
    channel.reply({"ready": True})
    for request in requests:
        try:
            (text,), _ = render_jinja_template(**request["arguments"])
            channel.reply({"text": text} if len(text) <= request["most"] else {"length": len(text)})
        except Exception as error:  # noqa: BLE001 - templates raise what they like
            channel.reply({"error": [type(error).__name__, str(error)[:_MOST_CHARACTERS]]})


if __name__ == "__main__":
    main()
