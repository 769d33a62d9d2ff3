"""What the Ray backend relies on in Ray beyond its public API. If an upgrade breaks it, a test here fails by name."""

from __future__ import annotations

import importlib.util
import inspect
import os
from pathlib import Path
from typing import Any, cast

import pytest
import ray
from ray._common.constants import HEAD_NODE_RESOURCE_NAME
from ray._private.accelerators.nvidia_gpu import NvidiaGPUAcceleratorManager
from ray._private.node import Node
from ray._private.state import GlobalState, available_resources_per_node
from ray._private.worker import Worker
from ray._raylet import InnerGcsClient  # type: ignore[attr-defined]  # compiled
from ray.core.generated import common_pb2, gcs_pb2
from ray.experimental import internal_kv
from ray.experimental.internal_kv import internal_kv_get_gcs_client
from ray.runtime_context import RuntimeContext
from ray.util.placement_group import placement_group

from cluster.backends import ray_backend, ray_env, ray_head, ray_placement


@pytest.mark.parametrize(
    ("caller", "helper"),
    [
        ("start_ray_processes", "start_log_monitor"),
        ("start_head_processes", "start_monitor"),
        ("start_head_processes", "start_api_server"),
    ],
)
def test_a_node_starts_each_helper_by_a_method_of_its_own(caller: str, helper: str) -> None:
    assert callable(getattr(Node, helper))
    assert helper in getattr(Node, caller).__code__.co_names


def test_disable_helpers_replaces_each_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("start_log_monitor", "start_monitor", "start_api_server")
    before = [getattr(Node, name) for name in names]
    for name, method in zip(names, before, strict=True):
        monkeypatch.setattr(Node, name, method)  # restores it
    ray_head.disable_helpers()
    assert not {getattr(Node, name) for name in names} & set(before)
    node: Any = object.__new__(Node)
    assert node.start_api_server(include_dashboard=False, raise_on_failure=True) is None


@pytest.mark.parametrize("setting", ["_node_ip_address", "_temp_dir", "_system_config"])
def test_init_takes_the_private_settings(setting: str) -> None:
    assert setting in inspect.unwrap(ray.init).__code__.co_consts


def test_the_gcs_client_lists_draining_nodes() -> None:
    assert list(inspect.signature(internal_kv_get_gcs_client).parameters) == []
    assert callable(InnerGcsClient.get_draining_nodes)


def test_the_gcs_keeps_texts_by_key_and_namespace() -> None:
    names = {
        "_internal_kv_get": ["key", "namespace"],
        "_internal_kv_put": ["key", "value", "overwrite", "namespace"],
        "_internal_kv_del": ["key", "del_by_prefix", "namespace"],
    }
    for name, expected in names.items():
        assert list(inspect.signature(getattr(internal_kv, name)).parameters) == expected


def test_the_table_of_placement_groups_names_the_node_of_each_bundle() -> None:
    common, gcs, state_class = cast(Any, common_pb2), cast(Any, gcs_pb2), cast(Any, GlobalState)
    bundle_id = common.Bundle.BundleIdentifier(bundle_index=3)
    bundle = common.Bundle(bundle_id=bundle_id, node_id=b"\x01\xff", unit_resources={"CPU": 1.0})
    group = gcs.PlacementGroupTableData(placement_group_id=b"\x02", name="worker-0", bundles=[bundle])
    shown = state_class()._gen_placement_group_info(group)
    assert shown["bundles_to_node_id"] == {3: "01ff"}


def test_a_placement_group_takes_labels_and_a_node_that_it_need_not_get() -> None:
    taken = inspect.signature(placement_group).parameters
    assert {"bundle_label_selector", "_soft_target_node_id"} <= taken.keys()
    assert not inspect.signature(available_resources_per_node).parameters


@pytest.mark.parametrize(
    ("module", "variable"),
    [
        ("ray._common.usage.usage_constants", "RAY_USAGE_STATS_ENABLED"),
        ("ray._private.accelerators.accelerator", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"),
        ("ray._private.accelerators.nvidia_gpu", "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"),
        ("ray.autoscaler._private.constants", "AUTOSCALER_METRIC_PORT"),
        ("ray._private.authentication.authentication_token_setup", "RAY_AUTH_MODE"),
    ],
)
def test_the_environment_variables_have_their_names(module: str, variable: str) -> None:
    assert any(variable in inspect.getsource(each) for each in (ray_backend, ray_env, ray_placement))
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    assert variable in Path(spec.origin).read_text(encoding="utf-8"), "Ray has another name for it now"


def test_the_node_of_the_head_has_its_resource() -> None:
    assert ray_backend.ON_HEAD == HEAD_NODE_RESOURCE_NAME


def test_a_worker_of_ray_can_be_told_to_leave_its_children_alone() -> None:
    (variable,) = ray_placement.CHILDREN_LIVE_ON["env_vars"]
    assert variable.encode() in (Path(ray.__file__).parent / "_raylet.so").read_bytes()


@pytest.mark.parametrize(("setting", "visible"), [("1", "0,1,2"), ("0", "1")])
def test_ray_leaves_the_visible_gpus_alone_if_told(monkeypatch: pytest.MonkeyPatch, setting: str, visible: str) -> None:
    (variable,) = ray_placement.ALL_GPUS_VISIBLE["env_vars"]
    monkeypatch.setenv(variable, setting)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    NvidiaGPUAcceleratorManager.set_current_process_visible_accelerator_ids(["1"])
    assert os.environ["CUDA_VISIBLE_DEVICES"] == visible


def test_an_actor_can_ask_which_gpu_it_got() -> None:
    """Names of the node's CUDA_VISIBLE_DEVICES if it has one: `device_of` finds them in the list again."""
    source = inspect.getsource(Worker.get_accelerator_ids_for_accelerator_resource)
    assert "self.original_visible_accelerator_ids" in source
    assert "str(original_ids[i]) for i in assigned_ids" in source
    assert callable(RuntimeContext.get_accelerator_ids)
