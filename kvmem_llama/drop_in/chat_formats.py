"""Which chat handlers a model brings along, and which format its chats have if nobody chooses one."""

from __future__ import annotations

from typing import Any, Final

from . import stock

_KEY: Final = "tokenizer.chat_template"
_DEFAULT: Final = "chat_template.default"
_FALLBACK: Final = "llama-2"


def choose_format(llama: Any) -> tuple[dict[str, Any], str | None]:
    """As llama_cpp.Llama does -> handlers by the names of the model's templates, the format to use."""
    formats = stock.chat_format
    bos, eos = llama.token_bos(), llama.token_eos()
    templates = {name[10:]: text for name, text in llama.metadata.items() if name.startswith(f"{_KEY}.")}
    if _KEY in llama.metadata:
        templates[_DEFAULT] = llama.metadata[_KEY]
    handlers = {
        name: formats.Jinja2ChatFormatter(
            template=text,
            eos_token=llama._model.token_get_text(eos) if eos != -1 else "",
            bos_token=llama._model.token_get_text(bos) if bos != -1 else "",
            stop_token_ids=[eos],
        ).to_chat_handler()
        for name, text in templates.items()
    }
    if llama.chat_format is not None or llama.chat_handler is not None:
        return handlers, llama.chat_format
    if _DEFAULT not in templates:
        return handlers, _FALLBACK
    return handlers, formats.guess_chat_format_from_gguf_metadata(llama.metadata) or _DEFAULT
