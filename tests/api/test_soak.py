"""The real server as a process under mixed load: scripts/soak.py on a random checkpoint."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoints import CONFIG, tensors, write_hf
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

ROOT = Path(__file__).parents[2]
TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"


def write_checkpoint(directory: Path) -> Path:
    """A random Llama with a byte-level tokenizer, without merges, and a chat template."""
    tokens = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    config = CONFIG | {"vocab_size": len(tokens), "max_position_embeddings": 512, "bos_token_id": 0, "eos_token_id": 1}
    write_hf(directory, config, tensors(config))
    tokenizer = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>", "chat_template": TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory


@pytest.mark.slow
def test_mixed_load_leaves_nothing_behind(tmp_path) -> None:
    model = write_checkpoint(tmp_path / "model")
    command = [sys.executable, str(ROOT / "scripts" / "soak.py"), str(model), "--requests", "200", "--time-limit", "150"]
    done = subprocess.run(
        [*command, "--compilation-cache-dir", str(tmp_path / "xla")], cwd=ROOT, capture_output=True, text=True, timeout=290
    )
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads(done.stdout)
    assert summary["preemptions"] > 0
    assert summary["sequences_aborted"] > 0
    assert {"stream", "whole", "refused", "control", "left"} <= set(summary["counts"])
