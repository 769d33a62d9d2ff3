"""Renders messages to prompt text with the checkpoint's Jinja template, in a sandbox.

The template comes with the checkpoint and the messages come from clients. Messages are only ever data. Jinja's
immutable sandbox isolates the template; `jinja_limits.py` bounds its time, iterations and text.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from jinja2 import TemplateError, TemplateSyntaxError, meta
from jinja2.exceptions import SecurityError

from tandem.checkpoint.json_fields import read_json_object
from tandem.clock import Clock, SystemClock
from tandem.errors import CheckpointError, ConfigError, InputError
from tandem.text.jinja_limits import Budget, LimitedEnvironment, LimitExceeded, TemplateLimits

_PROBE: Final = "a text that is looked for"
_TOKENS: Final = ("bos_token", "eos_token", "unk_token", "pad_token")


class _Refused(TemplateError):
    """Raised by a template's own `raise_exception`."""


def _raise_exception(message: str) -> None:
    raise _Refused(str(message)[:500])


def _strftime_now(form: str) -> str:
    """As transformers': templates write today's date with it."""
    return time.strftime(str(form)[:100])


class ChatTemplate:
    """A compiled template. `render` may be called from any thread. `reads_parts`: a message's content must be a list of
    parts; of a text, it would show nothing."""

    def __init__(
        self,
        source: str,
        *,
        tokens: Mapping[str, str] | None = None,
        limits: TemplateLimits | None = None,
        clock: Clock | None = None,
        where: str = "chat template",
    ) -> None:
        """`tokens` maps names such as bos_token to their texts, for the template. Raises CheckpointError."""
        self.source = source
        self._limits = limits or TemplateLimits()
        self._clock = clock or SystemClock()
        self._tokens = dict(tokens or {})
        if len(source) > self._limits.template_chars:
            raise CheckpointError(
                f"{where}: expected at most {self._limits.template_chars} characters, got {len(source)}", field="model"
            )
        environment = LimitedEnvironment(self._limits)
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.compile_limited(source)
            self.variables = frozenset(meta.find_undeclared_variables(environment.parse(source)))  # that it reads
            self._template.globals = dict(self._template.globals)  # faster to search than Jinja's chain of maps
        except (TemplateSyntaxError, RecursionError) as error:
            raise CheckpointError(f"{where}: expected a Jinja template, got: {error}", field="model") from error
        self.reads_parts = not self._shows(_PROBE) and self._shows([{"type": "text", "text": _PROBE}])

    def _shows(self, content: Any) -> bool:
        """Whether the prompt has the text of a user's message with this content."""
        try:
            return _PROBE in self.render([{"role": "user", "content": content}])
        except (InputError, ConfigError):
            return False

    @classmethod
    def load(cls, model_dir: Path) -> ChatTemplate | None:
        """From `chat_template.jinja`, `chat_template.json` (of some models that take images) or
        `tokenizer_config.json`; None if the checkpoint has no chat template.

        Raises CheckpointError naming the file if its template cannot be used.
        """
        config_path, jinja_path = model_dir / "tokenizer_config.json", model_dir / "chat_template.jinja"
        config = read_json_object(config_path) if config_path.exists() else {}
        json_path = model_dir / "chat_template.json"
        if jinja_path.exists():
            where = jinja_path
            try:
                source: str | None = jinja_path.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise CheckpointError(f"{where}: expected UTF-8 text, got: {error}", field="model") from error
        else:
            where, source = config_path, _template_of(config, config_path)
            if json_path.exists() and (other := _template_of(read_json_object(json_path), json_path)) is not None:
                where, source = json_path, other
        if source is None:
            return None
        tokens = {name: text for name in _TOKENS if (text := _token_text(config.get(name))) is not None}
        return cls(source, tokens=tokens, where=str(where))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt's text, including the text of special tokens. `settings`: further variables of the template.

        Raises InputError if the template refuses these messages or exceeds a limit, and ConfigError if it tries an
        operation that the sandbox forbids.
        """
        budget = Budget(self._limits, self._clock)
        variables: dict[str, Any] = {
            **(settings or {}),
            **self._tokens,
            Budget.NAME: budget,
            "messages": [dict(message) for message in messages],
            "add_generation_prompt": add_generation_prompt,
            "tools": tools,
            "documents": None,
        }
        pieces: list[str] = []
        try:
            for piece in self._template.generate(variables):
                budget.spend(len(piece))
                pieces.append(piece)
        except LimitExceeded as error:
            raise InputError(
                f"messages: the model's chat template exceeded a limit: {error}", field="messages"
            ) from error
        except SecurityError as error:
            raise ConfigError(
                f"model: the chat template tried a forbidden operation: {error}", field="model"
            ) from error
        except Exception as error:  # a template is a program: its errors end only this request
            raise InputError(f"messages: the model's chat template refused them: {error}", field="messages") from error
        return "".join(pieces)


def _template_of(config: Mapping[str, Any], path: Path) -> str | None:
    """`chat_template`: a string, or a list of named templates, of which `default` is for plain chat."""
    found = config.get("chat_template")
    if isinstance(found, list):
        named = {each.get("name"): each.get("template") for each in found if isinstance(each, dict)}
        found = named.get("default")
    if found is not None and not isinstance(found, str):
        raise CheckpointError(
            f"{path}: chat_template: expected a string or a list of named templates, got a {type(found).__name__}",
            field="chat_template",
        )
    return found


def _token_text(value: object) -> str | None:
    """A token is a string, or an object with a `content` field."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None
