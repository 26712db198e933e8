import dataclasses
from typing import Any

import numpy as np
import pytest

from pipelines.types.context import BaseContext
from pipelines.types.pipeline import PipelineInputs
from pipelines.types.pixel import PixelContext, PixelGenerationInputs, PixelGenerationRequest
from pipelines.types.text_request import Request
from pronghorn.errors import InvalidRequest
from pronghorn.ids import RequestID
from tests.fakes.wire_samples import buffer

ID = RequestID("r")


def request(**fields: Any) -> PixelGenerationRequest:
    return PixelGenerationRequest(**{"request_id": ID, "model_name": "m", "prompt": "a pronghorn", **fields})


def defaults(made: Any, *given: str) -> dict[str, Any]:
    return {f.name: getattr(made, f.name) for f in dataclasses.fields(made) if f.name not in given}


@pytest.mark.conformance(27)
def test_defaults_of_a_request() -> None:
    assert defaults(request(), "request_id", "model_name", "prompt") == {
        "secondary_prompt": None,
        "negative_prompt": None,
        "secondary_negative_prompt": None,
        "guidance_scale": 3.5,
        "true_cfg_scale": 1.0,
        "height": None,
        "width": None,
        "num_inference_steps": 50,
        "num_images_per_prompt": 1,
        "seed": None,
        "input_image": None,
    }
    assert isinstance(request(), Request) and str(request()) == "r"
    with pytest.raises(dataclasses.FrozenInstanceError):
        request().seed = 1  # type: ignore[misc]  # what is tested


REFUSED: list[tuple[str, Any]] = [
    ("prompt", ""),
    ("height", 0),
    ("height", -8),
    ("width", 0),
    ("num_inference_steps", 0),
    ("num_inference_steps", -1),
    ("num_images_per_prompt", 0),
]


@pytest.mark.conformance(27)
@pytest.mark.parametrize(("name", "value"), REFUSED)
def test_what_is_out_of_bounds_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequest, match=f"{name} is {value!r}; it must be") as caught:
        request(**{name: value})
    assert caught.value.param == name and isinstance(caught.value, ValueError)


TAKEN: list[dict[str, Any]] = [
    {"prompt": " "},
    {"negative_prompt": "", "secondary_prompt": "", "secondary_negative_prompt": ""},
    {"guidance_scale": -1.0, "true_cfg_scale": 0.0},
    {"height": 1, "width": 1, "num_inference_steps": 1, "seed": 0},
    {"input_image": np.zeros((2, 2, 3), dtype=np.uint8)},
]


@pytest.mark.conformance(27)
@pytest.mark.parametrize("fields", TAKEN)
def test_what_is_not_bounded_is_taken(fields: dict[str, Any]) -> None:
    made = request(**fields)
    assert all(getattr(made, name) is value for name, value in fields.items())


@pytest.mark.conformance(27)
def test_defaults_of_a_context() -> None:
    context = PixelContext(tokens=buffer())
    scalars = defaults(context, "tokens", "request_id", "status")
    given = {name: value for name, value in scalars.items() if value is not None and value != []}
    assert given == {
        "model_name": "",
        "height": 1024,
        "width": 1024,
        "num_inference_steps": 50,
        "num_warmup_steps": 0,
        "num_images_per_prompt": 1,
        "guidance_scale": 3.5,
        "true_cfg_scale": 1.0,
        "strength": 0.6,
        "cfg_normalization": False,
        "cfg_truncation": 1.0,
        "output_format": "jpeg",
    }
    assert isinstance(context, BaseContext) and not context.is_done


@pytest.mark.conformance(27)
def test_inputs_are_one_frozen_batch() -> None:
    context = PixelContext(tokens=buffer())
    inputs = PixelGenerationInputs(batch={context.request_id: context})
    assert isinstance(inputs, PipelineInputs) and inputs.batch[context.request_id] is context
    with pytest.raises(dataclasses.FrozenInstanceError):
        inputs.batch = {}  # type: ignore[misc]  # what is tested
