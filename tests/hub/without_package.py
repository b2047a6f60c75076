"""Run as a script: `trust_remote_code=True` in a process where hf_autonorm cannot be imported.

The argument is a JSON file, a list of jobs: `folder`, `auto` (class), `options` (of from_pretrained), `inputs` (a
file), `out` (a file: class, state, outputs, generated tokens), `again` (save there, load from there; or None).
"""

import json
import sys


class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "hf_autonorm":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


sys.meta_path.insert(0, Blocker())

import torch  # noqa: E402
import transformers  # noqa: E402


def work(folder, auto, options, inputs, out, again) -> None:
    print(f"loading {out}", file=sys.stderr, flush=True)
    auto, inputs = getattr(transformers, auto), torch.load(inputs)
    model = auto.from_pretrained(folder, **options)
    if again:
        model.save_pretrained(again)
        model = auto.from_pretrained(again, **options)
    for name, tensor in inputs.items():
        if tensor.is_floating_point():
            inputs[name] = tensor.to(model.dtype)
    with torch.no_grad():
        outputs = model(**inputs).to_tuple()
        generated = None
        if model.can_generate():
            prompt = {name: inputs[name] for name in ("input_ids", "attention_mask")}
            generated = model.generate(**prompt, max_new_tokens=4, do_sample=False)
    torch.save(
        {
            "class": (type(model).__module__, type(model).__name__),
            "layers": sorted({type(m).__name__ for m in model.modules() if hasattr(m, "strength")}),
            "state": dict(model.state_dict()),
            "outputs": [t for t in outputs if isinstance(t, torch.Tensor)],
            "generated": generated,
        },
        out,
    )


if __name__ == "__main__":
    for job in json.load(open(sys.argv[1])):
        work(**job)
    assert "hf_autonorm" not in sys.modules
