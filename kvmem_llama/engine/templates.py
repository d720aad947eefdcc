"""Messages to prompt, and answer to message: llama.cpp's chat code, with tools, JSON schemas and reasoning.

    with ChatTemplates(model) as templates:
        applied = templates.apply(messages, TemplateOptions(tools=tools))
        ...  # evaluate applied.prompt; sample with applied.sampling(params); stop at applied.additional_stops
        with applied.open_parser() as parser:
            for piece in pieces:
                send(parser.feed(piece))
            send(parser.feed("", is_partial=False))

Messages, tools and deltas are those of OpenAI's chat completions API.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Self

from ..errors import EngineClosed, InputError, InvalidRequest
from ..native import chat_shim
from .answer_parser import AnswerParser
from .grammar import AnswerGrammar, GrammarTrigger, ReasoningLimit
from .model import Model
from .sampler import SamplingParams

JsonObject = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class TemplateOptions:
    """What may be asked of an answer, besides the messages.

    A template that knows no tools (`ChatTemplates.caps`) leaves them out, and `tool_choice` then asks for
    nothing, as in llama-server.
    """

    tools: Sequence[JsonObject] = ()  # {"type": "function", "function": {"name", "parameters" ...}}
    tool_choice: str | JsonObject = "auto"  # "auto", "none", "required", or an object that names one function
    parallel_tool_calls: bool | None = None  # None: if the template can
    json_schema: JsonObject | None = None  # of the answer's content; {} means any object
    grammar: str = ""  # GBNF of the answer; not with json_schema or tools
    add_generation_prompt: bool | None = None  # None: unless the last message is continued
    continue_final_message: bool | str = False  # True, or which part: "content", "reasoning_content"
    reasoning_format: str = "auto"  # "none": reasoning stays in the content; else it is a part of its own
    enable_thinking: bool = True  # templates that cannot switch it ignore it
    template_kwargs: JsonObject = field(default_factory=dict)  # variables of the template
    force_pure_content: bool = False  # the answer is content, whatever it looks like
    reasoning_budget: int = -1  # most tokens of reasoning; -1: no limit
    reasoning_budget_message: str = ""  # forced before the end of a reasoning that is cut

    def request(self, messages: Sequence[JsonObject]) -> dict[str, object]:
        """The JSON that libkvmem_chat takes."""
        return {
            "messages": list(messages),
            "tools": list(self.tools),
            "tool_choice": self.tool_choice,
            "parallel_tool_calls": self.parallel_tool_calls,
            "json_schema": self.json_schema,
            "grammar": self.grammar,
            "add_generation_prompt": self.add_generation_prompt,
            "continue_final_message": self.continue_final_message,
            "reasoning_format": self.reasoning_format,
            "enable_thinking": self.enable_thinking,
            "chat_template_kwargs": self.template_kwargs,
            "force_pure_content": self.force_pure_content,
        }


@dataclass(frozen=True, slots=True)
class AppliedTemplate:
    """A rendered conversation, and all that is needed to sample and to read the answer to it."""

    prompt: str
    generation_prompt: str = ""  # the end of `prompt` that begins the answer; the parser reads it, too
    grammar: AnswerGrammar | None = None
    additional_stops: tuple[str, ...] = ()  # texts at which the answer ends
    preserved_tokens: tuple[str, ...] = ()  # control tokens that the text of the answer must hold
    supports_thinking: bool = False
    thinking_start_tag: str = ""  # "" if the template knows none
    thinking_end_tags: tuple[str, ...] = ()
    format: int = 0  # enum common_chat_format
    format_name: str = "Content-only"
    parser: str = ""  # how the answer is read, serialized; "": all of it is content
    is_continuation: bool = False

    @property
    def thinking_forced_open(self) -> bool:
        """The prompt ends inside a reasoning: the answer begins with it, without its start tag."""
        start = self.generation_prompt.rfind(self.thinking_start_tag) if self.thinking_start_tag else -1
        return start >= 0 and not any(
            self.generation_prompt.find(tag, start) >= 0 for tag in self.thinking_end_tags
        )

    def reasoning_limit(self, budget: int = -1, message: str = "") -> ReasoningLimit | None:
        """For SamplingParams.reasoning; None if the template knows no tags of reasoning.

        budget: tokens, -1 for no limit; message: text forced before the end tag.
        """
        if not self.thinking_start_tag or not any(self.thinking_end_tags):
            return None
        return ReasoningLimit(
            self.thinking_start_tag, self.thinking_end_tags, budget, message, self.generation_prompt
        )

    def sampling(self, params: SamplingParams, *, budget: int = -1, message: str = "") -> SamplingParams:
        """`params` with this answer's grammar, and with a limit on its reasoning if one is needed.

        A grammar that waits for a trigger needs one without a budget, too: it must not see the reasoning.
        """
        limit = params.reasoning
        if budget >= 0 or (limit is None and self.grammar and self.grammar.lazy):
            limit = self.reasoning_limit(budget, message)
        return replace(params, grammar=self.grammar or params.grammar, reasoning=limit)

    def open_parser(self, *, echo: bool = False) -> AnswerParser:
        """A reader of the answer. echo: the first delta holds what was there of a continued message."""
        return AnswerParser(
            {
                "format": self.format,
                "parser": self.parser,
                "generation_prompt": self.generation_prompt,
                "is_continuation": self.is_continuation,
                "echo": echo,
            }
        )


CONTENT_ONLY: Final = AppliedTemplate("")
"""No template: all of the answer is content."""


class ChatTemplates:
    """The chat templates of one model. Any thread; a context manager."""

    def __init__(
        self,
        model: Model | None,
        template: str = "",
        *,
        jinja: bool = True,
        bos_token: str = "",
        eos_token: str = "",
    ) -> None:
        """template: jinja that replaces the model's own; "chatml" is chatml, which a model without one gets.

        jinja: False: prompts are made by llama.cpp's own code for the format that the template is
        recognized as, or that it names (`llama3`, `command-r` ...); there are no tools then.
        Without a model the template must be given; bos_token and eos_token are its variables then.
        Raises TemplateUnsupported for one that cannot be used, LibraryMissing or LibraryMismatch.
        """
        self._shim = chat_shim.load()
        self._lock = threading.Lock()  # of the handle: nobody may close it while it is used
        self._handle: Any = None
        self._jinja: Final = jinja
        request = {"template": template, "jinja": jinja, "bos_token": bos_token, "eos_token": eos_token}
        self._handle, facts = self._shim.open_templates(model.pointer if model else None, request)
        self.source: Final[str] = facts["source"]
        self.tool_use_source: Final[str] = facts["tool_use_source"]  # "": no second one for tools
        # supports_tools, supports_tool_calls, supports_system_role ...: names of llama.cpp's jinja::caps
        self.caps: Final[Mapping[str, bool]] = MappingProxyType(facts["caps"])

    def apply(
        self, messages: Sequence[JsonObject], options: TemplateOptions | None = None
    ) -> AppliedTemplate:
        """The prompt for the next answer. Raises InvalidRequest or TemplateUnsupported."""
        options = options or TemplateOptions()
        if options.tools and not self._jinja:
            raise InvalidRequest("without jinja no template renders tools", hint="Leave --no-jinja out.")
        with self._lock:
            if self._handle is None:
                raise EngineClosed("the chat templates are closed", hint="Open them again.")
            applied = self._shim.apply(self._handle, options.request(messages))
        return AppliedTemplate(
            prompt=applied["prompt"],
            generation_prompt=applied["generation_prompt"],
            grammar=_grammar(applied, options),
            additional_stops=tuple(applied["additional_stops"]),
            preserved_tokens=tuple(applied["preserved_tokens"]),
            supports_thinking=applied["supports_thinking"],
            thinking_start_tag=applied["thinking_start_tag"],
            thinking_end_tags=tuple(applied["thinking_end_tags"]),
            format=applied["format"],
            format_name=applied["format_name"],
            parser=applied["parser"],
            is_continuation=bool(options.continue_final_message),
        )

    def close(self) -> None:
        """Idempotent."""
        with self._lock:
            handle, self._handle = self._handle, None
            if handle is not None:
                self._shim.close_templates(handle)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_template(path: str | Path) -> str:
    """The jinja text of a file. Raises InputError for one that cannot be read."""
    try:
        template = Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"template {str(path)!r}", str(error)) from error
    if not template.strip():
        raise InputError(f"template {str(path)!r}", "it is empty", hint="Give a jinja chat template.")
    return template


def json_schema_to_grammar(schema: object) -> str:
    """GBNF that allows exactly the JSON texts `schema` allows. Raises InvalidRequest."""
    return chat_shim.load().schema_to_grammar(schema)


def _grammar(applied: JsonObject, options: TemplateOptions) -> AnswerGrammar | None:
    if not applied["grammar"]:
        # Not every template passes the caller's own on; such a one begins after the prompt.
        return AnswerGrammar(options.grammar) if options.grammar else None
    return AnswerGrammar(
        applied["grammar"],
        lazy=applied["grammar_lazy"],
        triggers=tuple(GrammarTrigger(**trigger) for trigger in applied["grammar_triggers"]),
        preserved_tokens=tuple(applied["preserved_tokens"]),
        prefill="" if applied["grammar_lazy"] else applied["generation_prompt"],
    )
