"""What a batch may be: the same for `calibrate`, `patch(calibrate=)`, `fold`, `gates` and `example_inputs`."""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import BatchEncoding

from hf_autonorm import calibrate, fold, gates, patch, plan
from hf_autonorm.errors import ConfigError
from hf_autonorm.patching.batches import arguments_of
from tests.models import bert, build, images, perturb_gates, same_bits, timm_vit, tokens

VISION = {"timm_vit": 32, "timm_convnext": 64, "vit": 16, "convnext": 64}


def state_of(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def calibrated(family, batches, **fields):
    model, _ = build(family)
    report = calibrate(patch(model, **fields), batches)
    assert report.rows
    return state_of(model)


@pytest.mark.parametrize("family", VISION)
@pytest.mark.parametrize("labels", ["classes", "soft", "with index"])
def test_an_image_loaders_labels_are_left_out(family, labels):
    """A timm model's forward has an `attn_mask` next, a transformers one a switch: labels must reach neither."""
    pixels = images(VISION[family], batch=4)["pixel_values"]
    others = {
        "classes": (torch.arange(4) % 2,),
        "soft": (torch.rand(4),),
        "with index": (torch.arange(4) % 2, torch.arange(4)),
    }
    loader = DataLoader(TensorDataset(pixels, *others[labels]), batch_size=2)
    alone, pairs = calibrated(family, list(pixels.split(2))), calibrated(family, loader)
    assert all(same_bits(value, pairs[name]) for name, value in alone.items())


def test_every_verb_takes_a_loader():
    pixels = images(32)["pixel_values"]
    loader = DataLoader(TensorDataset(pixels, torch.zeros(2).long()), batch_size=2)
    one, other = (perturb_gates(patch(build("timm_vit")[0])) for _ in range(2))
    assert [r.weights for r in gates(one, loader)] == [r.weights for r in gates(other, [pixels])]
    folded = [fold(m, batches, tolerance=0.49).state_dict() for m, batches in ((one, loader), (other, [pixels]))]
    assert folded[0].keys() == folded[1].keys()
    assert len(plan(timm_vit(), example_inputs=(pixels, torch.zeros(2).long())).patched) == 5
    patch(timm_vit(), calibrate=loader)


def test_text_of_every_shape_is_the_same():
    """(ids, mask), (ids, mask, class), a dictionary with its label beside it: the mask counts, labels do not."""
    batch = tokens()
    ids, mask, classes = batch["input_ids"], batch["attention_mask"], torch.tensor([0, 1])
    expected = calibrated("bert", [batch])
    for same in ((ids, mask), [ids, mask, classes], (batch, classes), (BatchEncoding(batch), classes)):
        got = calibrated("bert", [same])
        assert all(same_bits(value, got[name]) for name, value in expected.items())
    without = calibrated("bert", [(ids, classes)])
    other = calibrated("bert", [ids])
    assert all(same_bits(value, other[name]) for name, value in without.items())
    assert any(not same_bits(value, expected[name]) for name, value in without.items())


class Two(nn.Module):
    """Forward needs both of its inputs."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(6)

    def forward(self, a, b, labels=None):
        return self.norm(a + b)


def test_what_forward_requires_is_an_input_and_a_parameter_for_labels_is_none():
    a, b, y = torch.randn(5, 6), torch.randn(5, 6), torch.randn(5, 6)
    model = Two()
    assert arguments_of(model, (a, b)) == ((a, b), {})
    assert arguments_of(model, [a, b, y]) == ((a, b), {})
    assert arguments_of(torch.compile(model, backend="eager"), [a, b, y]) == ((a, b), {})
    assert arguments_of(nn.DataParallel(model), [a, b, y]) == ((a, b), {})
    assert arguments_of(nn.Sequential(model), (a, b)) == ((a,), {})
    adapted = get_peft_model(bert(), LoraConfig(target_modules=["query"]))
    ids = torch.ones(2, 3).long()
    assert arguments_of(adapted, (ids, torch.zeros(2))) == ((ids,), {})


@pytest.mark.parametrize(
    "make, batch",
    [
        (timm_vit, lambda: (images(32)["pixel_values"], torch.zeros(2, 32, 32).long())),  # a segmentation map
        (bert, lambda: (tokens()["input_ids"], torch.full((2, 7), -100))),  # tags
        (bert, lambda: (tokens()["input_ids"], tokens()["attention_mask"], torch.zeros(2, 7).long())),
    ],
)
def test_what_may_be_an_input_or_a_label_is_an_error_with_a_remedy(make, batch):
    model = patch(make())
    before = state_of(model)
    with pytest.raises(ConfigError, match="ambiguous.*shape.*Give a dictionary"):
        calibrate(model, [batch()])
    assert all(same_bits(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    "batches, words",
    [
        ("some text", "must be an iterable of batches"),
        (None, "must be an iterable"),
        (5, "must be an iterable"),
        (True, "must be an iterable"),
        (["some text"], "batch 0 is text, 'some text'; tokenize it first"),
        ([("a", "b")], "tokenize it first"),
        ([torch.randn(2, 3, 32, 32), None], "batch 1 is a NoneType"),
        ([3], "batch 0 is a int"),
        ([object()], "batch 0 is a object; a batch is a dictionary"),
        ([()], "batch 0 is an empty tuple"),
        ([[[1, 2], [3]]], "batch 0 is a list of list"),
    ],
)
def test_what_is_no_batch_is_named_and_changes_nothing(batches, words):
    patched, plain = patch(timm_vit()), timm_vit()
    before, bare = state_of(patched), state_of(plain)
    calls = [lambda: calibrate(patched, batches)]
    if batches is not None:  # there None says: no batches
        calls += [lambda: patch(plain, calibrate=batches), lambda: gates(patched, batches)]
    for call in calls:
        with pytest.raises(ConfigError, match=words):
            call()
    assert all(same_bits(v, patched.state_dict()[k]) for k, v in before.items())
    assert plain.state_dict().keys() == bare.keys()


@pytest.mark.parametrize("form", [{}, {"norm": None, "linear": "affine_like"}])
def test_batches_made_in_inference_mode(form):
    x = images(16)["pixel_values"]
    expected = calibrated("vit", [x], **form)
    model = build("vit")[0]
    with torch.inference_mode():
        calibrate(patch(model, **form), [x.clone()])
    assert all(same_bits(value, expected[name]) for name, value in model.state_dict().items())
    with torch.inference_mode():  # then there is nothing to tune by, but all else is fitted
        assert calibrate(patch(build("vit")[0], **form), [x.clone()]).rows


def test_a_model_loaded_in_inference_mode_is_calibrated_too(tmp_path):
    """There its parameters may be ordinary and its buffers not."""
    patch(build("bert")[0], linear="affine_like").save_pretrained(tmp_path)
    with torch.inference_mode():
        model = type(bert()).from_pretrained(tmp_path)
    report = calibrate(model, [tokens()])
    assert report.rows and not report.never_called and report.cosine_after > 0


def test_the_report_says_what_was_not_called_and_what_saw_too_little():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.idle, self.pooled = nn.LayerNorm(6), nn.LayerNorm(6), nn.LayerNorm(6)

        def forward(self, x):
            return self.pooled(self.used(x).mean(1))

    model = patch(Net(), norm="dyt")
    start = copy.deepcopy(model.pooled.bias_branches.state_dict())
    report = calibrate(model, [torch.randn(1, 9, 6)])
    assert [row.name for row in report.rows] == ["used"]
    assert report.never_called == ["idle"] and report.too_few_tokens == ["pooled"]
    text = " ".join(str(report).split())
    assert "not called on these batches, and not fitted: idle" in text
    assert "less than two finite tokens, and not fitted: pooled" in text
    assert all(same_bits(value, start[name]) for name, value in model.pooled.bias_branches.state_dict().items())
    assert "not fitted" not in str(calibrate(patch(nn.LayerNorm(6), norm="dyt"), [torch.randn(4, 6)]))
