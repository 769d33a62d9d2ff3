"""Checks the Secrets and volumes that the Helm chart lists as requirements of a pod.

    - {value: auth.existingSecret, what: "Secret tandem-keys with keys.yaml", path: /etc/tandem-keys/keys.yaml}
    - {value: models.hubTokenSecret, what: "Secret hub with token", variable: HF_TOKEN}

The chart marks Secrets as optional, so Kubernetes starts the pod without them and the pod names what is missing.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import yaml
from pydantic import TypeAdapter, ValidationError, model_validator

from tandem.config.frozen import Frozen
from tandem.errors import ConfigError

VARIABLE = "TANDEM_REQUIREMENTS"  # path of the list; unset: no requirements


class Requirement(Frozen):
    """`value`: the chart value that requires it. Exactly one of `path` and `variable` is set."""

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
        """Where the requirement is missing; None if it is met."""
        if self.variable is not None:
            return None if environ.get(self.variable) else f"the variable {self.variable}"
        path = Path(self.path or "")
        return None if path.exists() and os.access(path, os.R_OK) else str(path)


_LIST = TypeAdapter(list[Requirement])


def check_requirements(environ: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """Returns the requirements that are met. Raises ConfigError that lists the missing ones."""
    if not (listed := environ.get(VARIABLE)):
        return ()
    requirements = _read(listed)
    missing = [(each, at) for each in requirements if (at := each.missing_from(environ)) is not None]
    if missing:
        text = "; ".join(f"{each.value}: expected {each.what} at {at}, and it is missing" for each, at in missing)
        raise ConfigError(f"{text}: create it, then delete the pod", field=missing[0][0].value)
    return tuple(each.what for each in requirements)


def origin_of(variable: str, environ: Mapping[str, str] = os.environ) -> str | None:
    """The requirement that sets the variable; None if no requirement does. Raises ConfigError."""
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
        reason = error.strerror or "cannot read it"
    except (yaml.YAMLError, UnicodeDecodeError):
        reason = "it is not YAML"
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ", ".join(f"entry {part + 1}" if isinstance(part, int) else part for part in first["loc"])
        message = first["msg"].removeprefix("Value error, ").replace("Input should be", "expected")
        reason = f"{place or 'the file'}: {message[:1].lower()}{message[1:]}"
    text = (
        f"{VARIABLE}: expected the chart's list of requirements in {listed}: {reason}; `helm upgrade` writes it again"
    )
    raise ConfigError(text, field=VARIABLE)
