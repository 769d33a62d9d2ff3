"""Messages to prompt text by the checkpoint's Jinja template, in a sandbox.

The template comes with the checkpoint and the messages come from clients. Messages are only ever data. The template
can reach nothing outside (Jinja's immutable sandbox) and has bounded time, iterations and text; `jinja_limits.py` holds
those bounds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from jinja2 import TemplateError, TemplateSyntaxError
from jinja2.exceptions import SecurityError

from tandem.checkpoint.json_fields import read_json_object
from tandem.clock import Clock, SystemClock
from tandem.errors import CheckpointError, ConfigError, InputError
from tandem.text.jinja_limits import Budget, LimitedEnvironment, LimitExceeded, Limits

_TOKENS: Final = ("bos_token", "eos_token", "unk_token", "pad_token")


class _Refused(TemplateError):
    """A template's own `raise_exception`."""


def _raise_exception(message: str) -> None:
    raise _Refused(str(message)[:500])


class ChatTemplate:
    """Compiled once; `render` may be called from any thread."""

    def __init__(
        self,
        source: str,
        *,
        tokens: Mapping[str, str] | None = None,
        limits: Limits | None = None,
        clock: Clock | None = None,
        where: str = "chat template",
    ) -> None:
        """`tokens`: the texts of bos_token and the like, as the template may name them. Raises CheckpointError."""
        self.source = source
        self._limits = limits or Limits()
        self._clock = clock or SystemClock()
        self._tokens = dict(tokens or {})
        if len(source) > self._limits.template_chars:
            raise CheckpointError(
                f"{where}: expected at most {self._limits.template_chars} characters, got {len(source)}", field="model"
            )
        environment = LimitedEnvironment(self._limits)
        environment.globals["raise_exception"] = _raise_exception
        try:
            self._template = environment.compile_limited(source)
            self._template.globals = dict(self._template.globals)  # a chain of maps, walked for every prompt
        except (TemplateSyntaxError, RecursionError) as error:
            raise CheckpointError(f"{where}: expected a Jinja template, got: {error}", field="model") from error

    @classmethod
    def load(cls, model_dir: Path) -> ChatTemplate | None:
        """From `chat_template.jinja` or `tokenizer_config.json`; None where the checkpoint has no chat template.

        Raises CheckpointError naming the file when there is one that cannot be used.
        """
        config_path, jinja_path = model_dir / "tokenizer_config.json", model_dir / "chat_template.jinja"
        config = read_json_object(config_path) if config_path.exists() else {}
        if jinja_path.exists():
            where = jinja_path
            try:
                source: str | None = jinja_path.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise CheckpointError(f"{where}: expected UTF-8 text, got: {error}", field="model") from error
        else:
            where, source = config_path, _template_of(config, config_path)
        if source is None:
            return None
        tokens = {name: text for name in _TOKENS if (text := _token_text(config.get(name))) is not None}
        return cls(source, tokens=tokens, where=str(where))

    def render(self, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool = True) -> str:
        """The prompt's text, special tokens spelt out.

        Raises InputError when the template refuses these messages or they take it over a limit, ConfigError when it
        tries what the sandbox forbids.
        """
        budget = Budget(self._limits, self._clock)
        variables: dict[str, Any] = {
            **self._tokens,
            Budget.NAME: budget,
            "messages": [dict(message) for message in messages],
            "add_generation_prompt": add_generation_prompt,
            "tools": None,
            "documents": None,
        }
        pieces: list[str] = []
        try:
            for piece in self._template.generate(variables):
                budget.spend(len(piece))
                pieces.append(piece)
        except LimitExceeded as error:
            raise InputError(
                f"messages: the model's chat template went over its limit: {error}", field="messages"
            ) from error
        except SecurityError as error:
            raise ConfigError(f"model: its chat template tried what is not allowed: {error}", field="model") from error
        except Exception as error:  # a template is a program: any fault of it ends this request and nothing else
            raise InputError(f"messages: the model's chat template refused them: {error}", field="messages") from error
        return "".join(pieces)


def _template_of(config: Mapping[str, Any], path: Path) -> str | None:
    """`chat_template`: a string, or a list of named ones of which `default` is for plain chat."""
    found = config.get("chat_template")
    if isinstance(found, list):
        named = {each.get("name"): each.get("template") for each in found if isinstance(each, dict)}
        found = named.get("default")
    if found is not None and not isinstance(found, str):
        raise CheckpointError(
            f"{path}: chat_template: expected a string or a list of named ones, got a {type(found).__name__}",
            field="chat_template",
        )
    return found


def _token_text(value: object) -> str | None:
    """A token is a string, or an object with its `content`."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None
