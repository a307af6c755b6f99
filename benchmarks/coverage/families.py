"""The models, built from configurations without downloads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn

from benchmarks.coverage.judge import Case, shorten

Build: TypeAlias = Callable[[], Case]
CLASSES, EXAMPLES = 3, 4
MAX_PARAMETERS = 150_000_000  # before a model is shortened
SIZES = (64, 96, 160, 224, 256, 288, 384)  # image sizes; some networks need large images

# timm's files of convolutional networks, without attention over positions or token mixing by dense layers.
_CONVOLUTIONAL = """
byobnet convmixer convnext cspnet cspnext densenet dla dpn efficientnet fasternet focalnet ghostnet hardcorenas hgnet hrnet
inception_next inception_resnet_v2 inception_v3 inception_v4 lcnetv2 mambaout mobilenetv3 nasnet nfnet pnasnet rdnet regnet
repghost repvit res2net resnest resnet resnetv2 rexnet selecsls senet sknet starnet tresnet vgg vovnet xception
xception_aligned
"""
CONVOLUTIONAL = frozenset(_CONVOLUTIONAL.split())

_SMALL = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "vocab_size": 50,
    "max_position_embeddings": 32,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
_DECODER = _SMALL | {"num_key_value_heads": 2, "head_dim": 8}
_GPT = {
    "n_embd": 16,
    "n_layer": 2,
    "n_head": 2,
    "vocab_size": 50,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}
_SEQ2SEQ = {
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "vocab_size": 50,
    "dropout": 0.0,
    "eos_token_id": 2,
}
# Model type → changes of its configuration.
TRANSFORMERS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("bert", "roberta", "electra", "camembert", "xlm-roberta", "mpnet", "layoutlm", "ernie"), _SMALL),
    **dict.fromkeys(("megatron-bert", "roformer", "nystromformer", "data2vec-text", "modernbert", "convbert"), _SMALL),
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "phi", "stablelm"), _DECODER),
    **dict.fromkeys(("gpt_neox", "starcoder2", "persimmon", "phi3", "smollm3"), _DECODER),
    "albert": _SMALL | {"embedding_size": 8, "num_hidden_groups": 1},
    "deberta-v2": _SMALL | {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "max_relative_positions": 16},
    "deberta": _SMALL | {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "max_relative_positions": 32},
    "opt": _SMALL | {"word_embed_proj_dim": 16, "ffn_dim": 24, "dropout": 0.0},
    "distilbert": {"dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 24, "vocab_size": 50, "dropout": 0.0}
    | {"attention_dropout": 0.0, "seq_classif_dropout": 0.0},
    "gpt2": _GPT,
    "gptj": _GPT | {"rotary_dim": 4},
    "gpt_neo": {"hidden_size": 16, "num_layers": 2, "num_heads": 2, "vocab_size": 50, "max_position_embeddings": 32}
    | {"attention_types": [[["global", "local"], 1]], "window_size": 4},
    "bloom": {"hidden_size": 16, "n_layer": 2, "n_head": 2, "vocab_size": 50},
    "xlnet": {"d_model": 16, "n_layer": 2, "n_head": 2, "d_inner": 24, "vocab_size": 50, "dropout": 0.0},
    "t5": {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2, "vocab_size": 50, "dropout_rate": 0.0}
    | {"eos_token_id": 2, "decoder_start_token_id": 0},
    "bart": _SEQ2SEQ,
    "mbart": _SEQ2SEQ,
}


def _without_dropout(model: nn.Module) -> nn.Module:
    for module in model.modules():
        for name in ("p", "dropout", "drop_prob", "drop_rate"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    return model


def _classified(model: nn.Module, size: int) -> Case:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(EXAMPLES, 3, size, size, generator=generator, dtype=torch.float64)

    def loss(batch: Sequence[Tensor]) -> Tensor:
        output = model(batch[0])
        return F.cross_entropy(output if isinstance(output, Tensor) else output[0], batch[1])

    return Case(model, [x, torch.arange(EXAMPLES) % CLASSES], loss)


def _image_case(build: Callable[[], nn.Module]) -> Case:
    torch.manual_seed(0)
    model = _without_dropout(build())
    if shorten(model):
        try:
            return _classified(model.double(), _size_for(model))
        except RuntimeError:  # the model depends on its number of blocks
            model = _without_dropout(build())
    return _classified(model.double(), _size_for(model))


def _size_for(model: nn.Module) -> int:
    problem = None
    for size in SIZES:
        try:
            with torch.no_grad():
                model.train()(torch.randn(2, 3, size, size, dtype=torch.float64))
                model.eval()(torch.randn(2, 3, size, size, dtype=torch.float64))
            return size
        except Exception as error:  # models raise different errors for a wrong size
            problem = error
    raise RuntimeError(f"no size of {SIZES} fits: {problem}")


def torchvision_models() -> Iterator[tuple[str, Build]]:
    """Every classifier of torchvision."""
    for name in torchvision.models.list_models(module=torchvision.models):
        yield name, partial(_image_case, partial(_torchvision_model, name))


def _torchvision_model(name: str) -> nn.Module:
    """The model; the widest RegNet has an eighth of its width, and VGG's head has 64 units instead of 4,096."""
    if name == "regnet_y_128gf":
        return _narrow_regnet()
    model = torchvision.models.get_model(name, weights=None, num_classes=CLASSES)
    if name.startswith("vgg"):
        model.classifier[0], model.classifier[3] = nn.Linear(512 * 49, 64), nn.Linear(64, 64)
        model.classifier[6] = nn.Linear(64, CLASSES)
    return model


def _narrow_regnet() -> nn.Module:
    from torchvision.models.regnet import BlockParams, RegNet

    widths = BlockParams.from_init_params(depth=27, w_0=56, w_a=20.1, w_m=2.52, group_width=32, se_ratio=0.25)
    return RegNet(widths, num_classes=CLASSES)


def timm_models() -> Iterator[tuple[str, Build]]:
    """The smallest model of each file of timm."""
    import timm

    for file in sorted(timm.models.list_modules()):
        yield file, partial(_timm_case, file)


def _timm_case(file: str) -> Case:
    """The smallest of the six models with the shortest names in a file of timm."""
    import timm

    names = sorted(timm.list_models(module=file), key=lambda name: (not name.startswith("test_"), len(name), name))
    sizes: dict[str, int] = {}
    for name in names[:6]:
        with torch.device("meta"):
            sizes[name] = sum(p.numel() for p in timm.create_model(name, num_classes=CLASSES).parameters())
    smallest = min(sizes, key=lambda name: sizes[name])
    if sizes[smallest] > MAX_PARAMETERS:
        raise RuntimeError("too large")
    return _image_case(partial(timm.create_model, smallest, num_classes=CLASSES))


def transformers_models() -> Iterator[tuple[str, Build]]:
    """Sequence classifiers, with as many positions as examples and with more positions."""
    for kind, changes in TRANSFORMERS.items():
        for positions in (EXAMPLES, EXAMPLES + 2):
            yield f"{kind}, {positions} positions", partial(_text_case, kind, changes, positions)


def _text_case(kind: str, changes: dict[str, Any], positions: int) -> Case:
    from transformers import AutoConfig, AutoModelForSequenceClassification

    config = AutoConfig.for_model(kind, **changes, num_labels=CLASSES, pad_token_id=0)
    torch.manual_seed(0)
    built = AutoModelForSequenceClassification.from_config(config, attn_implementation="eager")
    model = _without_dropout(built).double()
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn_like(param), alpha=0.1)
    x = torch.randint(3, 50, (EXAMPLES, positions))
    x[:, -1] = 2  # end-of-sequence token
    batch = [x, torch.arange(EXAMPLES) % CLASSES]

    def loss(batch: Sequence[Tensor]) -> Tensor:
        return F.cross_entropy(model(input_ids=batch[0]).logits, batch[1])

    loss(batch)  # fails here for an invalid configuration, before a verdict on the model
    return Case(model, batch, loss)


FAMILIES: dict[str, Callable[[], Iterator[tuple[str, Build]]]] = {
    "torchvision": torchvision_models,
    "timm": timm_models,
    "transformers": transformers_models,
}
