"""What workers with images do inside: signs of life from the encoder, and steps on their way to the other ranks."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.filterwarnings("default")  # those of vLLM's own modules


def test_the_encoder_shows_that_it_computes() -> None:
    from tandem.vllm_engine.images import report_encoder

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tower = torch.nn.ModuleList([torch.nn.Linear(2, 2) for _ in range(3)])
            self.text = torch.nn.Sequential(torch.nn.ModuleList([torch.nn.Linear(2, 2)]))

        def get_language_model(self) -> torch.nn.Module:
            return self.text

    model, told = Model(), list[int]()
    report_encoder(model, lambda: told.append(1))
    for layer in [*model.tower, *model.text.modules()]:
        if isinstance(layer, torch.nn.Linear):
            layer(torch.zeros(2))
    assert len(told) == 3


def test_a_step_with_images_reaches_the_other_ranks_whole() -> None:
    from vllm import SamplingParams
    from vllm.multimodal.inputs import (
        MultiModalFeatureSpec,
        MultiModalKwargsItem,
        PlaceholderRange,
    )
    from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput

    from tandem.vllm_engine.connector import StepExports
    from tandem.vllm_engine.steps import decode, encode

    item = MultiModalKwargsItem.dummy(40)
    is_embed = torch.tensor([False, True, True, False])
    feature = MultiModalFeatureSpec(
        data=item, modality="image", identifier="a:b", mm_position=PlaceholderRange(3, 4, is_embed), mm_hash="b"
    )
    step = SchedulerOutput.make_empty()
    step.scheduled_new_reqs = [
        NewRequestData("r", [1] * 9, [feature], SamplingParams(), None, ([1],), 0, None),
        NewRequestData("t", [1] * 9, [], SamplingParams(), None, ([2],), 0, None),
    ]
    step.num_scheduled_tokens = {"r": 9, "t": 9}
    step.scheduled_encoder_inputs, step.free_encoder_mm_hashes = {"r": [0]}, ["old"]
    step.kv_connector_metadata = StepExports(())
    got, pixels = decode(encode(step, lambda _: []))
    (image,), none = (each.mm_features for each in got.scheduled_new_reqs)
    assert none == []
    assert (image.identifier, image.modality) == ("a:b", "image")
    assert image.mm_position == feature.mm_position
    assert not image.data, "pixels come with the step that reads them"
    assert torch.equal(pixels["r"][0]["dummy"].data, item["dummy"].data)
    assert (got.scheduled_encoder_inputs, got.free_encoder_mm_hashes) == ({"r": [0]}, ["old"])
