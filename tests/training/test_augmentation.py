"""What is random in training hangs on seed, epoch and row alone; mixed labels, averaged weights."""

import copy

import pytest
import torch

pytest.importorskip("datasets")
pytest.importorskip("timm")

from torch.nn import functional
from transformers import BertConfig, BertForTokenClassification, Trainer, TrainingArguments
from transformers.modeling_outputs import ImageClassifierOutput

from hf_autonorm import patch
from tests.training.small import Small
from training.augmentation import (
    AugmentedRows,
    EpochCallback,
    ImageCollator,
    evaluation_transform,
    training_transform,
)
from training.ema import EmaCallback
from training.losses import cross_entropy

NUMBERS = [0.5] * 3, [0.25] * 3


def rows(count: int, size: int = 8) -> list[dict]:
    generator = torch.Generator().manual_seed(1)
    images = torch.randint(0, 256, (count, 3, size, size), generator=generator, dtype=torch.uint8)
    return [{"image": image, "labels": index % 3} for index, image in enumerate(images)]


def augmented(count: int = 6, seed: int = 0) -> AugmentedRows:
    return AugmentedRows(rows(count), lambda row: row["image"], training_transform(8, *NUMBERS, 2, True), seed)


# --- Images ---------------------------------------------------------------------------------------------------------


def test_draws_hang_on_seed_epoch_and_row_alone():
    first, second = augmented(), augmented()
    torch.manual_seed(5)
    backwards = [second[index]["pixel_values"] for index in reversed(range(6))][::-1]
    state = torch.get_rng_state()
    forwards = [first[index]["pixel_values"] for index in range(6)]
    assert all(map(torch.equal, forwards, backwards))
    assert torch.equal(torch.get_rng_state(), state)
    second.epoch = 1
    assert not all(torch.equal(second[index]["pixel_values"], forwards[index]) for index in range(6))
    assert not all(torch.equal(augmented(seed=1)[index]["pixel_values"], forwards[index]) for index in range(6))


def test_the_rows_know_their_epoch_also_after_a_break():
    told = augmented()
    for epoch, expected in ((None, 0), (0, 0), (1.0, 1), (1 + 1 / 3, 1), (3 - 1e-9, 3)):
        EpochCallback(told).on_epoch_begin(None, type("State", (), {"epoch": epoch}), None)
        assert told.epoch == expected


def test_a_training_image_is_a_shifted_perhaps_mirrored_original():
    plain = evaluation_transform(8, *NUMBERS)
    black = (0 - 0.5) / 0.25
    mirrored = shifted = 0
    for row, drawn in zip(rows(40), (augmented(40)[index] for index in range(40))):
        original = plain(row["image"])
        found = [
            (mirror, top, left)
            for mirror in (False, True)
            for top in range(5)
            for left in range(5)
            if torch.equal(
                functional.pad(original, (2, 2, 2, 2), value=black)[:, top : top + 8, left : left + 8],
                drawn["pixel_values"].flip(-1) if mirror else drawn["pixel_values"],
            )
        ]
        assert found
        mirrored += found[0][0]
        shifted += found[0][1:] != (2, 2)
    assert 8 < mirrored < 32 and shifted > 25


@pytest.mark.parametrize("height, width", [(8, 8), (8, 12), (16, 8), (5, 9)])
def test_evaluation_sees_the_middle_of_an_image_of_any_shape(height, width):
    image = torch.randint(0, 256, (3, height, width), dtype=torch.uint8)
    shown = evaluation_transform(8, *NUMBERS)(image)
    assert shown.shape == (3, 8, 8)
    if min(height, width) == 8:
        top, left = (height - 8) // 2, (width - 8) // 2
        middle = image[:, top : top + 8, left : left + 8] / 255
        assert torch.allclose(shown, (middle - 0.5) / 0.25, atol=1e-6)


@pytest.mark.parametrize("count", [1, 2, 5, 8])
@pytest.mark.parametrize("mixup, cutmix", [(0, 0), (1.0, 0), (0, 1.0), (1.0, 1.0)])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_mixed_targets_say_what_is_in_the_image(count, mixup, cutmix, smoothing):
    """Each class has images of one grey of its own, so an image tells its mixture."""
    collate = ImageCollator(4, mixup, cutmix, smoothing)
    for draw in range(10):
        batch = [
            {"pixel_values": functional.one_hot(torch.tensor(i % 4), 4).float().view(4, 1, 1).expand(4, 16, 16),
             "labels": i % 4, "draw": draw} for i in range(count)
        ]  # fmt: skip
        result = collate(batch)
        mixture = result["pixel_values"].mean((2, 3))  # the share of each class in each image
        assert torch.allclose(result["labels"], mixture * (1 - smoothing) + smoothing / 4, atol=1e-5)
        again = collate(batch)
        assert all(torch.equal(result[name], again[name]) for name in result)
    plain = collate([{key: row[key] for key in ("pixel_values", "labels")} for row in batch])
    assert plain["labels"].tolist() == [i % 4 for i in range(count)]  # evaluation: nothing is mixed


# --- The loss -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("shape", [(6,), (6, 5)])
def test_loss_over_accumulated_batches_is_that_of_one_batch(shape, smoothing):
    """In pieces of unequal size, with ignored labels, as Trainer counts them."""
    torch.manual_seed(0)
    logits, labels = torch.randn(*shape, 3, requires_grad=True), torch.randint(0, 3, shape)
    if len(shape) == 2:
        labels[torch.rand(shape) < 0.3] = -100
    expected = functional.cross_entropy(
        logits.flatten(0, -2), labels.flatten(), ignore_index=-100, label_smoothing=smoothing
    )
    compute, count = cross_entropy(smoothing), labels.ne(-100).sum()
    pieces = [(logits[:1], labels[:1]), (logits[1:], labels[1:])]
    total = sum(compute(ImageClassifierOutput(logits=x), y, num_items_in_batch=count) for x, y in pieces)
    assert torch.allclose(total, expected)
    assert torch.allclose(compute(ImageClassifierOutput(logits=logits), labels), expected)
    with torch.no_grad():  # an evaluation is not smoothed
        plain = compute(ImageClassifierOutput(logits=logits.detach()), labels)
    assert torch.allclose(plain, functional.cross_entropy(logits.flatten(0, -2), labels.flatten()))


def test_loss_of_targets_is_counted_by_images():
    logits, targets = torch.randn(6, 3), torch.rand(6, 3).softmax(-1)
    expected = functional.cross_entropy(logits, targets)
    count = targets.ne(-100).sum()  # Trainer counts entries
    parts = [(logits[:2], targets[:2]), (logits[2:], targets[2:])]
    total = sum(cross_entropy()(ImageClassifierOutput(logits=x), y, num_items_in_batch=count) for x, y in parts)
    assert torch.allclose(total, expected)
    assert torch.allclose(cross_entropy()(ImageClassifierOutput(logits=logits), targets), expected)


@pytest.mark.parametrize("batch_size", [1, 2, 4])
def test_accumulated_batches_move_the_weights_as_one_batch_does(tmp_path, batch_size):
    """Sentences of unequal length, and a head that takes `num_items_in_batch` and does not use it."""
    ids = [[5, 6, 7, 8, 9], [5, 6], [7, 8, 9], [5]]
    data = [{"input_ids": x, "attention_mask": [1] * len(x), "labels": [i % 3 for i in x]} for x in ids]

    def collate(rows):
        longest = max(len(row["input_ids"]) for row in rows)
        padding = {"input_ids": 0, "attention_mask": 0, "labels": -100}
        return {
            name: torch.tensor([row[name] + [value] * (longest - len(row[name])) for row in rows])
            for name, value in padding.items()
        }

    def train(size: int) -> dict:
        torch.manual_seed(0)
        config = BertConfig(
            vocab_size=12, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
            num_labels=3, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )  # fmt: skip
        arguments = TrainingArguments(
            tmp_path, per_device_train_batch_size=size, gradient_accumulation_steps=4 // size, max_steps=1,
            use_cpu=True, optim="sgd", learning_rate=1.0, max_grad_norm=0.0, save_strategy="no", disable_tqdm=True,
        )  # fmt: skip
        model = BertForTokenClassification(config)
        Trainer(model, arguments, collate, train_dataset=data, compute_loss_func=cross_entropy(0.1)).train()
        return dict(model.named_parameters())

    expected = train(4)
    for name, weight in train(batch_size).items():
        assert torch.allclose(weight, expected[name], atol=1e-5), name


# --- Averaged weights -----------------------------------------------------------------------------------------------


def small_trainer(folder, model, callbacks, **options):
    torch.manual_seed(0)
    data = [{"x": x, "labels": x.sum()} for x in torch.randn(12, 3)]
    arguments = TrainingArguments(
        folder,
        per_device_train_batch_size=4,
        max_steps=5,
        learning_rate=0.1,
        use_cpu=True,
        disable_tqdm=True,
        **options,
    )
    return Trainer(model=model, args=arguments, train_dataset=data, eval_dataset=data, callbacks=callbacks)


def test_average_is_what_is_evaluated_and_kept(tmp_path):
    """Against the definition, over weights that are looked at after each step; training itself stays as it was."""
    seen, evaluated = [], []

    class Look(EmaCallback):
        def on_step_end(self, args, state, control, model=None, **kwargs):
            seen.append(copy.deepcopy(dict(model.named_parameters())))
            super().on_step_end(args, state, control, model=model, **kwargs)

        def on_evaluate(self, args, state, control, model=None, **kwargs):
            evaluated.append(copy.deepcopy(dict(model.named_parameters())))
            super().on_evaluate(args, state, control, model=model, **kwargs)

    torch.manual_seed(0)
    model = patch(Small(), strength=0.5)
    plain = copy.deepcopy(model)
    start = copy.deepcopy(dict(model.named_parameters()))
    trainer = small_trainer(tmp_path / "a", model, [Look(0.8)], eval_strategy="steps", eval_steps=2)
    trainer.train()

    average, by_step = start, []
    for weights in seen:
        average = {name: 0.8 * average[name] + 0.2 * weights[name] for name in average}
        by_step.append(average)
    for name, weight in model.named_parameters():
        assert torch.allclose(weight, by_step[-1][name], atol=1e-6), name
    steps = [entry["step"] for entry in trainer.state.log_history if "eval_loss" in entry]
    assert len(steps) == len(evaluated) >= 2
    for step, weights in zip(steps, evaluated):
        assert all(torch.allclose(weights[name], by_step[step - 1][name], atol=1e-6) for name in weights)
    assert float(model.norm.strength) == 0.5

    alone = small_trainer(tmp_path / "b", plain, [], eval_strategy="steps", eval_steps=2)
    alone.train()
    assert all(torch.equal(weight, seen[-1][name]) for name, weight in plain.named_parameters())


def test_wrong_uses_of_the_average(tmp_path):
    for decay in (-0.1, 1.0):
        with pytest.raises(ValueError, match="at least 0 and below 1"):
            EmaCallback(decay)
    options = {"eval_strategy": "epoch", "save_strategy": "epoch", "load_best_model_at_end": True}
    with pytest.raises(ValueError, match="leave load_best_model_at_end out"):
        small_trainer(tmp_path / "a", Small(), [EmaCallback(0.9)], **options).train()
    with pytest.raises(ValueError, match="that run had no ema_decay"):
        small_trainer(tmp_path / "b", Small(), [EmaCallback(0.9, str(tmp_path))]).train()
