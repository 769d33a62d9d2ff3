"""What a pod was promised and only the platform can put there: Secrets and volumes, listed by the Helm chart.

    - {value: auth.existingSecret, what: "Secret tandem-keys with keys.yaml", path: /etc/tandem-keys/keys.yaml}
    - {value: models.hubTokenSecret, what: "Secret hub with token", variable: HF_TOKEN}

Kubernetes starts a pod without an optional Secret, so that the pod can say by name what it lacks.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import yaml
from pydantic import TypeAdapter, ValidationError, model_validator

from tandem.config.frozen import Frozen
from tandem.errors import ConfigError

VARIABLE = "TANDEM_REQUIREMENTS"  # the list's file; unset: nothing was promised


class Requirement(Frozen):
    """`value` is the chart's value that asks for it."""

    value: str
    what: str
    path: str | None = None
    variable: str | None = None

    @model_validator(mode="after")
    def _one_place(self) -> Requirement:
        if (self.path is None) == (self.variable is None):
            raise ValueError("expected either path or variable")
        return self

    def missing_from(self, environ: Mapping[str, str]) -> str | None:
        """Where it should be and is not."""
        if self.variable is not None:
            return None if environ.get(self.variable) else f"the variable {self.variable}"
        path = Path(self.path or "")
        return None if path.exists() and os.access(path, os.R_OK) else str(path)


_LIST = TypeAdapter(list[Requirement])


def check_requirements(environ: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """What is there, in words. Raises ConfigError that names everything that is not."""
    if not (listed := environ.get(VARIABLE)):
        return ()
    requirements = _read(listed)
    missing = [(each, at) for each in requirements if (at := each.missing_from(environ)) is not None]
    if missing:
        told = "; ".join(f"{each.value}: expected {each.what} at {at}, and it is missing" for each, at in missing)
        raise ConfigError(f"{told}: make it, then delete the pod", field=missing[0][0].value)
    return tuple(each.what for each in requirements)


def origin_of(variable: str, environ: Mapping[str, str] = os.environ) -> str | None:
    """Where the variable was promised to come from, in words; None: nobody promised it. Raises ConfigError."""
    listed = environ.get(VARIABLE)
    for each in _read(listed) if listed else ():
        if each.variable == variable:
            missing = ", which is missing" if each.missing_from(environ) else ""
            return f"{each.value} ({each.what}{missing})"
    return None


def _read(listed: str) -> list[Requirement]:
    try:
        return _LIST.validate_python(yaml.safe_load(Path(listed).read_text(encoding="utf-8")))
    except OSError as error:
        reason = error.strerror or "it cannot be read"
    except (yaml.YAMLError, UnicodeDecodeError):
        reason = "it is not YAML"
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ", ".join(f"entry {part + 1}" if isinstance(part, int) else part for part in first["loc"])
        message = first["msg"].removeprefix("Value error, ").replace("Input should be", "expected")
        reason = f"{place or 'the file'}: {message[:1].lower()}{message[1:]}"
    text = f"{VARIABLE}: expected the chart's list of requirements in {listed}: {reason}; `helm upgrade` writes it anew"
    raise ConfigError(text, field=VARIABLE)
