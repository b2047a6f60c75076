"""A transformer over the features of a table (FT-Transformer, arXiv 2106.11959), for one or more numbers.

Each feature becomes a token, xⱼ·wⱼ + bⱼ; a [CLS] token goes before them and is read out after the last layer. Layers
are pre-norm: x + attention(norm(x)), x + mlp(norm(x)). Features and targets are standardised inside, by numbers kept
in buffers, so that the model takes and gives the data's units; the loss is that of the standardised targets.
"""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional
from transformers import AutoConfig, AutoModel, PreTrainedConfig, PreTrainedModel
from transformers import initialization as init
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import ModelOutput


class FeatureTransformerConfig(PreTrainedConfig):
    model_type = "feature_transformer"

    def __init__(
        self,
        features: list[str] | None = None,
        targets: list[str] | None = None,
        hidden_size: int = 128,
        num_hidden_layers: int = 12,
        num_attention_heads: int = 8,
        intermediate_size: int = 256,
        dropout: float = 0.1,
        initializer_range: float = 0.02,
        **kwargs,
    ) -> None:
        self.features, self.targets = list(features or ["x"]), list(targets or ["y"])
        self.hidden_size, self.intermediate_size = hidden_size, intermediate_size
        self.num_hidden_layers, self.num_attention_heads = num_hidden_layers, num_attention_heads
        self.dropout, self.initializer_range = dropout, initializer_range
        super().__init__(**kwargs)


@dataclass
class RegressionOutput(ModelOutput):
    """loss: mean squared error of the standardised targets. logits: (batch, targets), in the data's units."""

    loss: torch.Tensor | None = None
    logits: torch.Tensor | None = None


class Standardize(nn.Module):
    """Columns to mean 0 and standard deviation 1, and back; in fp32, whatever the model computes in."""

    def __init__(self, columns: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(columns))
        self.register_buffer("std", torch.ones(columns))

    @torch.no_grad()
    def fit(self, values: torch.Tensor) -> None:
        """values: (rows, columns). A constant column keeps its scale."""
        std, mean = torch.std_mean(values.double(), dim=0, correction=0)
        self.mean.copy_(mean)
        self.std.copy_(torch.where(std > 0, std, 1.0))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return (values.float() - self.mean.float()) / self.std.float()

    def back(self, values: torch.Tensor) -> torch.Tensor:
        return values.float() * self.std.float() + self.mean.float()


class FeatureTokens(nn.Module):
    """(batch, features) -> (batch, 1 + features, hidden_size)."""

    def __init__(self, config: FeatureTransformerConfig) -> None:
        super().__init__()
        shape = (len(config.features), config.hidden_size)
        self.weight, self.bias = nn.Parameter(torch.empty(shape)), nn.Parameter(torch.empty(shape))
        self.cls = nn.Parameter(torch.empty(1, config.hidden_size))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        tokens = values.to(self.weight.dtype).unsqueeze(-1) * self.weight + self.bias
        return torch.cat([self.cls.expand(len(values), 1, -1), tokens], dim=1)


class FeatureTransformerLayer(GradientCheckpointingLayer):
    def __init__(self, config: FeatureTransformerConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.heads, self.dropout = config.num_attention_heads, config.dropout
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, config.intermediate_size), nn.Linear(config.intermediate_size, width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        tokens = tokens + self.drop(self.attend(self.attention_norm(tokens)))
        return tokens + self.drop(self.down(self.drop(functional.gelu(self.up(self.mlp_norm(tokens))))))

    def attend(self, tokens: torch.Tensor) -> torch.Tensor:
        query, key, value = self.qkv(tokens).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        rate = self.dropout if self.training else 0.0
        mixed = functional.scaled_dot_product_attention(query, key, value, dropout_p=rate)
        return self.out(mixed.transpose(1, 2).flatten(-2))

    def drop(self, tokens: torch.Tensor) -> torch.Tensor:
        return functional.dropout(tokens, self.dropout, self.training)


class FeatureTransformer(PreTrainedModel):
    config_class = FeatureTransformerConfig
    main_input_name = "features"
    supports_gradient_checkpointing = True
    _no_split_modules = ["FeatureTransformerLayer"]
    _keep_in_fp32_modules_strict = ["feature_scale", "target_scale"]

    def __init__(self, config: FeatureTransformerConfig) -> None:
        super().__init__(config)
        self.feature_scale = Standardize(len(config.features))
        self.target_scale = Standardize(len(config.targets))
        self.tokens = FeatureTokens(config)
        self.layers = nn.ModuleList(FeatureTransformerLayer(config) for _ in range(config.num_hidden_layers))
        self.final_norm = nn.LayerNorm(config.hidden_size)
        self.head = nn.Linear(config.hidden_size, len(config.targets))
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, FeatureTokens):
            for parameter in (module.weight, module.bias, module.cls):
                init.normal_(parameter, std=self.config.hidden_size**-0.5)
        elif isinstance(module, Standardize):
            init.zeros_(module.mean)
            init.ones_(module.std)

    def forward(
        self, features: torch.Tensor, labels: torch.Tensor | None = None, return_dict: bool | None = None
    ) -> RegressionOutput | tuple:
        """features: (batch, features), labels: (batch, targets), both in the data's units."""
        tokens = self.tokens(self.feature_scale(features))
        for layer in self.layers:
            tokens = layer(tokens)
        standardised = self.head(self.final_norm(tokens[:, 0]))
        loss = None
        if labels is not None:
            loss = functional.mse_loss(standardised.float(), self.target_scale(labels))
        output = RegressionOutput(loss=loss, logits=self.target_scale.back(standardised))
        return output.to_tuple() if return_dict is False else output


AutoConfig.register(FeatureTransformerConfig.model_type, FeatureTransformerConfig)
AutoModel.register(FeatureTransformerConfig, FeatureTransformer)
