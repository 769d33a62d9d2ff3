"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Config = Annotated[
    Path | None,
    typer.Option("--config", help="Cluster spec (YAML), see docs/configuration.md. Default: built-in defaults."),
]
Model = Annotated[
    str | None,
    typer.Option("--model", help="Pulled model, checkpoint folder or GGUF file. Default: the spec's first model."),
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Any key of the spec, such as models.0.prefill.engine.dtype=bfloat16; can be repeated. Default: none.",
    ),
]
ServedName = Annotated[
    str | None, typer.Option("--model", help="Served name of the model. Default: the cluster's only model.")
]
Address = Annotated[
    str | None,
    typer.Option("--address", help="Admin address (HOST:PORT) of the cluster. Default: a cluster on this machine."),
]
Tls = Annotated[
    Path | None,
    typer.Option(
        "--tls",
        envvar="TANDEM_TLS",
        help="Folder made by `tandem certs`, for mutual TLS. Default: the local cluster's.",
    ),
]
ClusterName = Annotated[
    str | None,
    typer.Option("--cluster", "--name", help="Name of the running cluster. Default: the only one on this machine."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
