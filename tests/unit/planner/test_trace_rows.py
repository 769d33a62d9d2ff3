"""Logs of several models: notes name them, and the user chooses rows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from planner.traces.arrivals import Gamma
from planner.traces.read import read_trace
from planner.traces.rows import parse_conditions
from planner.traces.trace import TrafficTrace
from tandem.errors import ConfigError, InputError

LOG_ROW = {"arrival_s": 1, "prompt_tokens": 5, "output_tokens": 2}
MOONCAKE = [
    {"timestamp": 1000 * number, "input_length": tokens, "output_length": 5, "hash_ids": [0, 1, number]}
    for number, tokens in enumerate((1200, 1100, 1300, 1250))
]


def lines(*rows: object) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def written(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


SEVERAL = (
    "time,Model,tenant,input_tokens,output_tokens\n"
    "0,large,a,10,2\n1,large,b,20,3\n2,small,a,30,4\n3,large,a,40,5\n5,tiny,b,50,0\n"
)


def log(folder: Path) -> Path:
    return written(folder, "log.csv", SEVERAL)


def read(path: Path, *where: str) -> TrafficTrace:
    return read_trace(path, where=parse_conditions(where))


def test_a_log_of_several_models_names_them_with_their_shares(tmp_path: Path) -> None:
    found = read(log(tmp_path))
    assert found.notes[0] == (
        "Model has 3 values (large 60.0%, small 20.0%, tiny 20.0%): results are for one model, so choose its rows "
        "with --where Model=NAME"
    )
    assert found.notes[-1] == "columns not used: tenant"


def test_rows_are_chosen_by_their_values(tmp_path: Path) -> None:
    found = read(log(tmp_path), "Model=large")
    assert found.prompt_tokens.tolist() == [10, 20, 40]
    assert found.arrival_s.tolist() == [0.0, 1.0, 3.0]
    assert found.notes == ("rows with Model=large: 3 of 5", "time: read as seconds", "columns not used: tenant")
    both = read(log(tmp_path), "Model=large", "tenant = a")
    assert both.prompt_tokens.tolist() == [10, 40]
    assert both.notes == ("rows with Model=large and tenant=a: 2 of 5", "time: read as seconds")


def test_of_one_column_any_of_the_values_will_do(tmp_path: Path) -> None:
    found = read(log(tmp_path), "Model=small", "Model=large", "tenant=a")
    assert found.prompt_tokens.tolist() == [10, 30, 40]
    assert found.notes[:2] == (
        "rows with Model=small or large and tenant=a: 3 of 5",
        "Model has 2 values (large 66.7%, small 33.3%): results are for one model, so choose its rows with "
        "--where Model=NAME",
    )


def test_a_row_without_a_model_is_no_second_model(tmp_path: Path) -> None:
    log = "time,engine,input_tokens,output_tokens\n0,a,10,2\n1,,20,3\n2,{},30,4\n3,a,40,5\n"
    one, two = (written(tmp_path, f"{model}.csv", log.format(model)) for model in ("a", "b"))
    assert read(one).notes == ("time: read as seconds",)
    assert read(two).notes[0].startswith("engine has 2 values (a 50.0%, (none) 25.0%, b 25.0%): ")
    assert read(two, "engine=").prompt_tokens.tolist() == [20]


def test_five_of_many_models_are_named(tmp_path: Path) -> None:
    rows = "".join(f"{at},m{at % 7},10,2\n" for at in range(70))
    many = written(tmp_path, "log.csv", "time,deployment,input_tokens,output_tokens\n" + rows)
    assert "(m0 10.0%" not in read(many).notes[0]
    assert read(many).notes[0].startswith("deployment has 7 values (m0 14.3%, m1 14.3%, ")
    assert " and 2 more): " in read(many).notes[0]


def test_lengths_alone_may_name_models_too(tmp_path: Path) -> None:
    path = written(tmp_path, "l.csv", "model,prompt_tokens,output_tokens,kind\na,10,2,x\nb,20,3,x\na,30,4,y\n")
    where = parse_conditions(["model=a", "kind=x"])
    assert read_trace(path, arrivals=Gamma(2.0), where=where).prompt_tokens.tolist() == [10]
    with pytest.raises(InputError, match="line 1, kind: expected"):
        read_trace(path, arrivals=Gamma(2.0), where=where[:1])


def test_json_lines_may_name_models_too(tmp_path: Path) -> None:
    rows = [row | {"model_name": name} for row, name in zip(MOONCAKE, "abab", strict=True)]
    path = written(tmp_path, "m.jsonl", lines(*rows))
    assert read(path).notes[0].startswith("model_name has 2 values (a 50.0%, b 50.0%)")
    found = read(path, "model_name=b")
    assert found.prompt_tokens.tolist() == [1100, 1250]
    assert found.prefixes is not None
    assert found.prefixes.of(0).tolist() == [0, 1, 1]


def test_a_request_log_is_read_by_class_and_tenant_and_columns_of_ones_own(tmp_path: Path) -> None:
    blocks = {"block_hashes": [1], "block_tokens": 4}
    rows = [
        LOG_ROW | {"tenant": "a", "try": 1} | blocks,
        LOG_ROW | {"prompt_tokens": 6, "try": 2, "block_hashes": [1], "block_tokens": 5},
        LOG_ROW | {"prompt_tokens": 7, "tenant": "a", "try": 2} | blocks,
    ]
    path = written(tmp_path, "log.jsonl", lines(*rows))
    assert read(path, "tenant=a", "try=2").prompt_tokens.tolist() == [7]
    other = read(path, "tenant=", "try=2")
    assert other.prompt_tokens.tolist() == [6]
    assert other.prefixes is not None
    assert other.prefixes.block_tokens == 5, "of the first row that is chosen"
    with pytest.raises(InputError, match="line 1, try: expected only the columns arrival_s, "):
        read(path, "tenant=a")


@pytest.mark.parametrize(
    ("where", "said"),
    [
        (["modle=a"], r"a column of log.csv \(time, Model, tenant, input_tokens, output_tokens\), got 'modle'"),
        (["Model=huge"], r"a value that Model has \(large 60.0%, small 20.0%, tiny 20.0%\), got 'huge'"),
        (["Model=huge", "Model=vast"], "got 'huge' or 'vast'"),
        (
            ["Model=small", "tenant=b"],
            r"a value that tenant has in rows with Model=small \(a 100.0%\), got 'b'",
        ),
    ],
)
def test_rows_that_are_not_there_are_told_from_those_that_are(tmp_path: Path, where: list[str], said: str) -> None:
    with pytest.raises(InputError, match=said) as caught:
        read(log(tmp_path), *where)
    assert caught.value.field == "--where"


def test_a_folder_of_clients_has_no_rows(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="--where: expected a file with rows, got the folder"):
        read(tmp_path, "model=a")


@pytest.mark.parametrize("text", ["model", "=a", ""])
def test_a_condition_is_a_column_and_a_value(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--where: expected COLUMN=VALUE, such as model=llama-3-70b, got"):
        parse_conditions([text])
