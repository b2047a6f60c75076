"""A few dozen quick models that show every behaviour of norms once; `sample` for the default tests."""

from typing import NamedTuple

from torch import nn

from .build import build, recipes
from .timm_models import build_timm, timm_names


class Entry(NamedTuple):
    """One model of the zoo; `str(entry)` is its test id."""

    library: str
    name: str
    head: str = ""

    def build(self, seed: int = 0) -> tuple[nn.Module, dict]:
        """The model and its inputs."""
        return build_timm(self.name, seed) if self.library == "timm" else build(self.name, self.head, seed)

    def __str__(self) -> str:
        return "/".join(part for part in self if part)


# the order matters: every prefix mixes libraries, modalities and norms
_CHOSEN = """
bert/base                    LayerNorm after the residual sum
llama/causal_lm              its own RMSNorm class
timm/test_vit                LayerNorm of timm
timm/test_convnext           LayerNorm over channels first
t5/seq2seq_lm                encoder-decoder, RMSNorm without mean
gemma2/base                  (1 + w) RMSNorm
timm/test_resnet             BatchNorm
clip/base                    two towers
whisper/base                 audio, encoder-decoder
gpt2/causal_lm               LayerNorm, Conv1D instead of Linear
mixtral/base                 mixture of experts
olmo/base                    LayerNorm without parameters
cohere/causal_lm             LayerNorm without bias
mamba/base                   state space
mamba2/causal_lm             a gated norm with two inputs
siglip/base                  nn.MultiheadAttention inside
llava/base                   image placeholders in text
wav2vec2/base                GroupNorm in the feature extractor
convnext/image_cls           own channels-first class
nemotron/base                LayerNorm with 1 + w
bit/base                     GroupNorm with activation
deberta/base                 own LayerNorm class
timm/convnext_zepto_rms      RMSNorm over channels first
timm/poolformerv2_s12        GroupNorm with one group, no bias
bart/seq_cls                 sequences that end in a special token
qwen3/token_cls              norms of queries and keys
vit/image_cls                image classifier
distilbert/masked_lm         masked language model
bert/multiple_choice         three-dimensional input ids
qwen2_vl/base                patches with a grid
deepseek_v3/base             latent attention, shared experts
resnet/image_cls             BatchNorm of transformers
swin/base                    window attention
mobilebert/base              NoNorm: an affine map that is called a norm
ibert/base                   integer LayerNorm
bamba/base                   attention and state space
qwen3_next/base              gated RMSNorm, linear attention
gemma3n_text/base            RMSNorm with and without weight
xlstm/base                   norm over heads
moonshine_streaming/base     LayerNorm whose weight is `gamma`
timm/test_efficientnet_evos  EvoNorm
timm/test_nfnet              no norm at all
timm/mambaout_femto          gated convolution
timm/test_byobnet            BatchNorm with activation
hubert/base                  audio encoder
segformer/semantic_segmentation  BatchNorm in the decoder
dinov2/backbone              feature maps
""".strip().splitlines()


def sample(n: int = 36) -> list[Entry]:
    """The first `n` of a stratified choice; beyond it, models spread evenly over all the rest."""
    chosen = []
    for line in _CHOSEN:
        library, _, rest = (word := line.split()[0]).partition("/")
        chosen.append(Entry("timm", rest) if library == "timm" else Entry("transformers", *word.split("/")))
    if n <= len(chosen):
        return chosen[:n]
    rest = sorted(set(every()) - set(chosen))
    wanted = min(n - len(chosen), len(rest))
    return chosen + [rest[i * len(rest) // wanted] for i in range(wanted)]


def every() -> list[Entry]:
    """Everything that builds: each head of each model type, then the timm models."""
    entries = [Entry("transformers", name, head) for name, by_head in recipes().items() for head in by_head]
    return entries + [Entry("timm", name) for name in timm_names()]
