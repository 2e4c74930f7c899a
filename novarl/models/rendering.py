"""The process in which chat templates are rendered, as transformers renders them: `python -m novarl.models.rendering`.

A template is a program that came with a model. The sandbox keeps it from the system, and not from the processor and
the memory: only a process that can be killed, and whose memory is limited, bounds it.

    {"memory": bytes}                      -> {"ready": true}     transformers is there
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

    with contextlib.suppress(ValueError, OSError):  # a system that does not limit it
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
