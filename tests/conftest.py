"""Shared by all tests: the reference that token-exactness is measured against, and certificates."""

from __future__ import annotations

import datetime
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from transformers import LlamaForCausalLM

from tandem.request import SamplingParams
from tandem.sampling.sampler import choose
from tandem.token_history import TokenHistory

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell that runs the tests in the background has SIGINT ignored, and every process they start would inherit it.
    signal.signal(signal.SIGINT, signal.default_int_handler)

CLEAR = 1e-3  # by how much a best logit must lead for an fp32 test to rest on it


class Reference:
    """Answers prompts in fp32, one token at a time: the logits of `transformers`, our sampler."""

    def __init__(self, model_dir: Path) -> None:
        self._model = LlamaForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()

    def answer(self, prompt: Sequence[int], sampling: SamplingParams) -> list[int]:
        """Refuses to rest on a near tie, so that no test depends on the last bits of a sum."""
        tokens = list(prompt)
        past = None
        with torch.inference_mode():
            for _ in range(sampling.max_tokens):
                feed = torch.tensor([tokens if past is None else tokens[-1:]])
                out = self._model(feed, past_key_values=past, use_cache=True)
                past, row = out.past_key_values, out.logits[0, -1]
                best = row.topk(2).values
                if best[0] - best[1] < CLEAR:
                    raise ValueError(f"a near tie after {len(tokens)} tokens: choose another prompt or seed")
                history = TokenHistory(prompt, tokens[len(prompt) :])
                tokens.append(choose(row.numpy(), sampling, len(tokens), history).token_id)
                if tokens[-1] in sampling.stop_token_ids:
                    break
        return tokens[len(prompt) :]

    def logprobs(self, tokens: Sequence[int]) -> torch.Tensor:
        """[tokens - 1, vocab_size]: row i is the distribution of token i + 1."""
        with torch.inference_mode():
            return self._model(torch.tensor([tokens])).logits[0, :-1].double().log_softmax(dim=-1)


@pytest.fixture(scope="session")
def reference_for() -> Callable[[Path], Reference]:
    """The reference of a checkpoint; loaded once per checkpoint."""
    loaded: dict[Path, Reference] = {}

    def get(model_dir: Path) -> Reference:
        if model_dir not in loaded:
            loaded[model_dir] = Reference(model_dir)
        return loaded[model_dir]

    return get


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
def authority(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Authority]:
    """`authority("ours").issue("worker")`: the paths of a certificate, its key and its authority."""
    return lambda name: Authority(tmp_path_factory.mktemp(name))
