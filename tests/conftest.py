"""Shared by all tests: the reference that token-exactness is measured against, and certificates."""

from __future__ import annotations

import datetime
import gc
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from transformers import AutoConfig, AutoModelForCausalLM

from tandem.request import SamplingParams
from tandem.sampling.sampler import choose
from tandem.testing.disks import SmallDisk, small_disk
from tandem.testing.models import write_tiny_llama
from tandem.token_history import TokenHistory
from tests.acceptance_results import AcceptanceResults

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell that runs the tests in the background has SIGINT ignored, and every process they start would inherit it.
    signal.signal(signal.SIGINT, signal.default_int_handler)

hypothesis.settings.register_profile("tandem", deadline=None)  # no test depends on how fast something is
hypothesis.settings.load_profile("tandem")

collect_ignore = ["clients"]  # in an environment of their own: make clients
if find_spec("vllm") is None:
    collect_ignore.append("vllm")  # likewise: make test-vllm
WHOLE = {"e2e", "system"}  # folders whose tests share one cluster, or a port that a reader would use
ROOT = Path(__file__).parent
CLEAR = 1e-3  # by how much a best logit must lead for an fp32 test to rest on it


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--acceptance-results", action="store_true", help="note how the acceptance tests ended")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--acceptance-results") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(AcceptanceResults())


@pytest.hookimpl(tryfirst=True)  # before that of pytest-xdist, which reads the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With several processes (`make test`), each file runs in one of them, so that its fixtures start once."""
    for item in items:
        if item.get_closest_marker("acceptance"):
            item.user_properties.append(("acceptance", True))
        inside = item.path.relative_to(ROOT)
        item.add_marker(pytest.mark.xdist_group(inside.parts[0] if inside.parts[0] in WHOLE else str(inside)))


def pytest_collection() -> None:
    """What collection makes lives to the end, and the garbage collector would walk all of it again and again."""
    gc.disable()


def pytest_collection_finish(session: pytest.Session) -> None:
    """pytest-xdist appends the group to the name of a test by a private part of pytest."""
    gc.freeze()
    gc.enable()
    is_grouped = hasattr(session.config, "workerinput") and session.config.getoption("loadgroup")
    if is_grouped and not all("@" in item.nodeid.rpartition("]")[2] for item in session.items):
        raise pytest.UsageError("pytest-xdist does not group tests with this pytest: install scripts/constraints.txt")


class Reference:
    """Answers prompts in fp32, one token at a time: the logits of `transformers`, our sampler."""

    def __init__(self, model_dir: Path) -> None:
        # Of its attentions the one that is written out: the others know no cap of scores.
        self._model = AutoModelForCausalLM.from_pretrained(
            model_dir, dtype=torch.float32, attn_implementation="eager"
        ).eval()  # type: ignore[no-untyped-call]

    def answer(self, prompt: Sequence[int], sampling: SamplingParams) -> list[int]:
        """Refuses to rest on a near tie, so that no test depends on the last bits of a sum."""
        tokens = list(prompt)
        past = None
        with torch.inference_mode():
            for _ in range(sampling.max_tokens):
                feed = torch.tensor([tokens if past is None else tokens[-1:]])
                out = self._model(feed, None, None, past, use_cache=True)  # by place: its name changed in 5.24
                past, row = out.past_key_values, out.logits[0, -1]
                best = row.topk(2).values
                if best[0] - best[1] < CLEAR:
                    raise ValueError(f"a near tie after {len(tokens)} tokens: choose another prompt or seed")
                history = TokenHistory(prompt, tokens[len(prompt) :])
                tokens.append(choose(row.numpy(), sampling, len(tokens), history).token_id)
                if tokens[-1] in sampling.stop_token_ids:
                    break
        return tokens[len(prompt) :]

    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        """[tokens, vocab_size]"""
        with torch.inference_mode():
            logits: torch.Tensor = self._model(torch.tensor([tokens])).logits[0]
            return logits

    def logprobs(self, tokens: Sequence[int]) -> torch.Tensor:
        """[tokens - 1, vocab_size]: row i is the distribution of token i + 1."""
        return self.logits(tokens)[:-1].double().log_softmax(dim=-1)


@pytest.fixture(autouse=True)
def same_draws() -> None:
    """A test of random tensors has the same ones in every run, so a tolerance that holds once holds always."""
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def reference_for() -> Callable[[Path], Reference]:
    """The reference of a checkpoint; loaded once per checkpoint."""
    loaded: dict[Path, Reference] = {}

    def get(model_dir: Path) -> Reference:
        if model_dir not in loaded:
            loaded[model_dir] = Reference(model_dir)
        return loaded[model_dir]

    return get


_WINDOWED = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 24}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    # Equal, for `transformers` changes from one to the other within an answer, which no KV cache can follow.
    "short_factor": [1.0, 2.0, 3.0, 4.0],
    "long_factor": [1.0, 2.0, 3.0, 4.0],
    "original_max_position_embeddings": 64,
}
_YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 64}
_MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}

# What each family's own test checkpoint has beside the sizes: (model_type, fields).
FAMILIES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, yarn": ("llama", {"rope_parameters": _YARN}),
    "mistral": ("mistral", {"sliding_window": 24}),
    "qwen2": ("qwen2", {"use_sliding_window": True, "max_window_layers": 2, "sliding_window": 24}),
    "qwen3": ("qwen3", {}),
    "qwen3_moe": ("qwen3_moe", {"num_experts": 4, "mlp_only_layers": [1], **_MOE}),
    "gemma2": ("gemma2", {"query_pre_attn_scalar": 24, **_WINDOWED}),
    "gemma3": ("gemma3_text", {"query_pre_attn_scalar": 24, **_WINDOWED}),
    "phi3": ("phi3", {"sliding_window": 24}),
    "phi3, longrope": (
        "phi3",
        {"rope_parameters": {**_LONGROPE, "partial_rotary_factor": 0.5}, "original_max_position_embeddings": 64},
    ),
    "mixtral": ("mixtral", {"num_local_experts": 4, "sliding_window": 24}),
}


def write_family(folder: Path, family: str) -> Path:
    """A tiny random checkpoint that `transformers` itself made, with a tokenizer of bytes."""
    kind, fields = FAMILIES[family]
    write_tiny_llama(folder, vocab=320)
    sizes = {
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
    }
    head_dim = {} if kind == "phi3" else {"head_dim": 16}
    special = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    config = AutoConfig.for_model(kind, **sizes, **head_dim, **special, **fields)
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(7)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
        for name, weight in model.named_parameters():
            # Wide enough that answers vary and best logits lead clearly; norms stay near what they were.
            spread = 0.2 if "norm" in name else 1.0 if "embed" in name or "lm_head" in name else 0.25
            weight.add_(torch.randn(weight.shape) * spread)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session", params=FAMILIES)
def family_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of each family in turn."""
    return write_family(tmp_path_factory.mktemp("family"), request.param)


_USUAL_FAMILIES = ("gemma3", "qwen3_moe")  # windows and two ropes; experts. `make soak` takes them all


@pytest.fixture(
    scope="session",
    params=[pytest.param(name, marks=() if name in _USUAL_FAMILIES else pytest.mark.soak_only) for name in FAMILIES],
)
def some_family_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same for tests that start processes."""
    return write_family(tmp_path_factory.mktemp("family"), request.param)


class Authority:
    """A certificate authority that lives in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"{folder.name} authority")])
        self.ca = folder / "ca.pem"
        self._write(self.ca, self._certificate(self._name, self._key, is_authority=True))

    def issue(self, name: str, *, expired: bool = False) -> dict[str, str]:
        """The paths of `transfer.tls`."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        cert, key_path = self._folder / f"{name}.pem", self._folder / f"{name}.key"
        self._write(cert, self._certificate(subject, key, expired=expired))
        key_path.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        return {"cert": str(cert), "key": str(key_path), "ca": str(self.ca)}

    def _certificate(
        self, subject: x509.Name, key: ec.EllipticCurvePrivateKey, *, is_authority: bool = False, expired: bool = False
    ) -> x509.Certificate:
        now, day = datetime.datetime.now(datetime.UTC), datetime.timedelta(days=1)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - 2 * day)
            .not_valid_after(now - day if expired else now + day)
            .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
            .sign(self._key, hashes.SHA256())
        )

    def _write(self, path: Path, certificate: x509.Certificate) -> None:
        path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    """A file system of 2 MB."""
    try:
        with small_disk(tmp_path / "disk", 2 << 20) as found:
            yield found
    except PermissionError as error:
        pytest.skip(str(error))


@pytest.fixture
def authority(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Authority]:
    """`authority("ours").issue("worker")`: the paths of a certificate, its key and its authority."""
    return lambda name: Authority(tmp_path_factory.mktemp(name))
