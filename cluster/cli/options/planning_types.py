"""Options that several of the planning commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Traffic = Annotated[
    str, typer.Argument(help="Trace file, folder of ServeGen clients, or `synthetic`; see docs/planning.md.")
]
Arrivals = Annotated[
    str | None,
    typer.Option(
        help="Arrivals, for a trace without them: poisson:RATE, gamma:RATE:CV, ramp:FROM:TO:SECONDS or "
        "diurnal:RATE:SWING:PERIOD_S. Default: those of the trace."
    ),
]
Lengths = Annotated[
    str | None, typer.Option(help="Mean tokens of a synthetic trace: PROMPT:OUTPUT or PROMPT:OUTPUT:CV:CV.")
]
Prefixes = Annotated[
    str | None,
    typer.Option(
        help="Shared prefixes of a synthetic trace, before the prompts of --lengths: COUNT:TOKENS:SHARE. Default: none."
    ),
]
Start = Annotated[float, typer.Option("--start", help="Skip requests that arrive before this second.", min=0)]
Duration = Annotated[float | None, typer.Option("--duration", help="Seconds of the trace to use. Default: all.", min=0)]
Requests = Annotated[
    int | None,
    typer.Option("--requests", "--limit", help="Maximum number of requests. Default: all; 1000 if synthetic.", min=1),
]
Load = Annotated[float, typer.Option("--load", "--time-scale", help="Factor on the arrival rate.")]
Prompts = Annotated[float, typer.Option(help="Factor on prompt lengths.")]
Outputs = Annotated[float, typer.Option(help="Factor on output lengths.")]
Seed = Annotated[int, typer.Option(help="Seed of all random draws.")]
Jitter = Annotated[bool, typer.Option(help="Spread arrivals that the source rounded to seconds over the second.")]
Where = Annotated[
    list[str] | None,
    typer.Option(
        "--where",
        metavar="COLUMN=VALUE",
        help="Take the rows of the trace with this value, such as model=llama-3-70b; can be repeated. Default: all.",
    ),
]
ModelName = Annotated[
    str | None,
    typer.Option("--model", help="llama-3-70b, ..., or a checkpoint folder. Default: the spec's first model."),
]
Device = Annotated[str, typer.Option(help="a100, h100, h200, b200, cpu, or a YAML file with a device.")]
Cost = Annotated[
    str | None,
    typer.Option(
        help="Step times: FILE.json of `tandem profile`, or a table FILE:MODEL or FILE:MODEL/HARDWARE. "
        "Default: computed from the device."
    ),
]
ElementBytes = Annotated[
    float | None,
    typer.Option(
        help="Bytes per element of weights and KV: 1 for fp8, 2 for bf16, 4 for fp32. "
        "Default: weights as published, else the device's."
    ),
]
KvBytes = Annotated[float | None, typer.Option(help="Bytes per element of KV. Default: as --element-bytes.")]
ExpertBytes = Annotated[
    float | None,
    typer.Option(help="Bytes per element of the experts' weights. Default: as published, else as --element-bytes."),
]
Constrained = Annotated[
    float, typer.Option("--constrained", help="Share of the requests whose answers a schema or grammar constrains.")
]
Acceptance = Annotated[
    str | None,
    typer.Option(
        help="Speculation as CHANCE[:TOKENS[:DRAFT_SHARE]]: the chance that a proposed token is right, the most for a "
        "request in a step (8), and the time to draft one, of a step's (0). Default: the file's of --cost, else none."
    ),
]
Calibration = Annotated[
    Path | None,
    typer.Option("--calibration", help="File of `tandem calibrate`, which corrects the step times. Default: none."),
]
OneHost = Annotated[
    bool, typer.Option("--one-host", help="All workers share the cores of the host on which --cost was measured.")
]
Prefill = Annotated[
    int | None, typer.Option(help="Prefill workers; 0 turns disaggregation off. Default: the spec's, else 1.")
]
Decode = Annotated[int | None, typer.Option(help="Decode workers. Default: the spec's, else 1.")]
PrefillTp = Annotated[
    int | None, typer.Option(help="Tensor-parallel ranks of each prefill worker. Default: the spec's, else 1.")
]
DecodeTp = Annotated[
    int | None, typer.Option(help="Tensor-parallel ranks of each decode worker. Default: the spec's, else 1.")
]
Autoscale = Annotated[bool, typer.Option("--autoscale", help="Turn the autoscaler on: roles follow the load.")]
Ttft = Annotated[
    float | None, typer.Option("--ttft", help="Objective for the time to first token, in seconds. Default: none.")
]
Tpot = Annotated[
    float | None, typer.Option("--tpot", help="Objective for the time per output token, in seconds. Default: none.")
]
ClassSlo = Annotated[
    list[str] | None,
    typer.Option(
        "--class-slo",
        help="Objectives of one class of requests, repeatable: CLASS=TTFT,TPOT; either may be empty. Default: those of "
        "--ttft and --tpot.",
    ),
]
