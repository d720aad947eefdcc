"""`kvmem serve`: a llama-server-compatible endpoint with memory."""

from __future__ import annotations

import typer

from .messages import note, warn


def serve(context: typer.Context) -> None:
    """Serve an endpoint for clients of llama-server, OpenAI and Anthropic.

    It takes llama-server's flags: see `kvmem serve --help`.
    """
    from ..server.flags import help_text, parse

    if any(argument in ("-h", "--help") for argument in context.args):
        print(help_text())
        return
    parsed = parse(context.args)
    for text in parsed.warnings:
        warn(text)

    from ..server.generate import make_slots
    from ..server.running import run
    from ..server.state import ServerState

    run(ServerState(parsed.settings, parsed.options, make_slots=make_slots, told=note))
