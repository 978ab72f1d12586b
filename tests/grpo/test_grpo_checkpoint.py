"""Checkpoints: whole or absent, and a trainer that goes on from one makes the same bits as one that never stopped."""

import random
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from grpo_material import load, make_policy_folder, random_traces, seal, settings_for
from safetensors import safe_open

from polar.grpo import checkpoint
from polar.grpo.batch import train_batch
from polar.grpo.errors import CheckpointError, PublicationError
from polar.grpo.model import sha256
from polar.grpo.trainer import GrpoTrainer, must_publish

ROOM = Path(__file__).parent


@pytest.fixture(autouse=True)
def _nondeterminism_allowed_afterwards():
    yield
    torch.use_deterministic_algorithms(False)


def batch(number):
    traces = random_traces(number)
    return train_batch(seal(number, traces), traces)


def train(settings, numbers):
    with GrpoTrainer(settings) as trainer:
        return [trainer.train(batch(number), number * 10) for number in numbers]


@pytest.mark.parametrize("tied", [True, False])
def test_stopping_after_each_step_changes_no_bit(tmp_path, tied):
    model_dir = make_policy_folder(tmp_path / "model", tied=tied)
    through = train(settings_for(tmp_path / "a", model_dir), [1, 2, 3])
    stopping = [train(settings_for(tmp_path / "b", model_dir), [number])[0] for number in (1, 2, 3)]
    assert [w.sha256 for w in through] == [w.sha256 for w in stopping]
    assert [w.probe for w in through] == [w.probe for w in stopping]
    assert len({w.sha256 for w in through}) == 3


def test_a_checkpoint_is_a_policy_folder_with_the_base_models_tokenizer(tmp_path):
    model_dir = make_policy_folder(tmp_path / "model")
    published = train(settings_for(tmp_path / "run", model_dir), [1])[0]
    folder = Path(published.path)
    assert folder == tmp_path / "run" / "checkpoints" / "policy" / "v1"
    assert sha256(folder / "model.safetensors") == published.sha256
    for name in ("tokenizer.json", "chat_template.jinja"):
        assert (folder / name).read_bytes() == (model_dir / name).read_bytes()
    assert [path.name for path in folder.glob("*.safetensors")] == ["model.safetensors"]
    with safe_open(folder / "model.safetensors", "pt") as tensors:
        assert "lm_head.weight" not in set(tensors.keys())
    model = load(folder)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


def test_the_trainer_stands_where_the_newest_checkpoint_says(tmp_path):
    settings = settings_for(tmp_path / "run", make_policy_folder(tmp_path / "model"))
    published = train(settings, [1, 2])[-1]
    with GrpoTrainer(settings) as trainer:
        random_numbers = random.random(), np.random.random(), torch.rand(1)
        again = trainer.announcement()
        assert (trainer.version, trainer.next_offset) == (2, 20)
        assert (again.version, again.path, again.sha256) == (published.version, published.path, published.sha256)
        assert (again.probe, again.metrics) == (published.probe, published.metrics)
    with GrpoTrainer(settings):
        assert random_numbers == (random.random(), np.random.random(), torch.rand(1))


def test_what_a_crash_left_is_removed_and_not_taken_for_a_version(tmp_path):
    settings = settings_for(tmp_path / "run", make_policy_folder(tmp_path / "model"))
    train(settings, [1])
    root = tmp_path / "run" / "checkpoints" / "policy"
    shutil.copytree(root / "v1", root / f"{checkpoint.MAKING}v2")
    shutil.copytree(root / "v1", root / f"{checkpoint.REMOVING}v0")
    with GrpoTrainer(settings) as trainer:
        assert trainer.version == 1
        assert sorted(path.name for path in root.iterdir()) == [".lock", "v1"]


@pytest.mark.parametrize(("kept", "left"), [(3, [3, 4, 5]), (1, [4, 5])])
def test_the_newest_versions_are_kept(tmp_path, kept, left):
    settings = settings_for(tmp_path / "run", make_policy_folder(tmp_path / "model"), checkpoints_kept=kept)
    train(settings, [1, 2, 3, 4, 5])
    assert checkpoint.complete_versions(tmp_path / "run" / "checkpoints" / "policy") == left


def test_a_changed_checkpoint_is_refused(tmp_path):
    settings = settings_for(tmp_path / "run", make_policy_folder(tmp_path / "model"))
    weights = Path(train(settings, [1])[0].path) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x01")
    with pytest.raises(CheckpointError, match="has changed"), GrpoTrainer(settings):
        pass


def test_a_version_is_never_written_twice(tmp_path):
    settings = settings_for(tmp_path / "run", make_policy_folder(tmp_path / "model"))
    with GrpoTrainer(settings) as trainer:
        (tmp_path / "run/checkpoints/policy/v1").mkdir()
        with pytest.raises(CheckpointError, match="never written twice"):
            trainer.train(batch(1), 10)


def test_two_trainers_do_not_share_a_folder(tmp_path):
    settings = settings_for(tmp_path / "run", make_policy_folder(tmp_path / "model"))
    with GrpoTrainer(settings), pytest.raises(CheckpointError, match="another trainer"), GrpoTrainer(settings):
        pass
    with GrpoTrainer(settings):
        pass


def test_a_run_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    settings = settings_for(tmp_path / "file", make_policy_folder(tmp_path / "model"))
    with pytest.raises(CheckpointError, match="file/checkpoints/policy"), GrpoTrainer(settings):
        pass


FULL_DISK = """
import sys
from pathlib import Path
from test_grpo_checkpoint import batch, settings_for
from polar.grpo.errors import CheckpointError
from polar.grpo.trainer import GrpoTrainer
run_dir, model_dir = map(Path, sys.argv[1:])
filler = run_dir / "filler"
for size in (160_000, 80_000):
    filler.write_bytes(bytes(size))
    with GrpoTrainer(settings_for(run_dir, model_dir)) as trainer:
        try:
            trainer.train(batch(1), 10)
        except CheckpointError as error:
            print(error)
        print(sorted(path.name for path in (run_dir / "checkpoints" / "policy").iterdir()))
filler.unlink()
with GrpoTrainer(settings_for(run_dir, model_dir)) as trainer:
    print(trainer.train(batch(1), 10).sha256)
"""


def test_a_full_disk_leaves_nothing_half_written(tmp_path):
    """The disk has 320 kB, the checkpoint 280 kB: it ends within the weights (87 kB), then within the optimizer."""
    if shutil.which("bwrap") is None:
        pytest.skip("bubblewrap makes the small disk")
    model_dir = make_policy_folder(tmp_path / "model")
    (tmp_path / "run").mkdir()
    disk = ["bwrap", "--dev-bind", "/", "/", "--size", "320000", "--tmpfs", str(tmp_path / "run")]
    command = [*disk, sys.executable, "-c", FULL_DISK, str(tmp_path / "run"), str(model_dir)]
    done = subprocess.run(command, cwd=ROOM, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    *failures, trained = done.stdout.splitlines()
    for message, left in (failures[:2], failures[2:]):
        assert "cannot write checkpoint" in message and "No space left" in message
        assert left == "['.lock']"
    assert trained == train(settings_for(tmp_path / "elsewhere", model_dir), [1])[0].sha256


def test_what_is_published_at_the_start_follows_from_what_was(tmp_path):
    settings = settings_for(tmp_path / "run", make_policy_folder(tmp_path / "model"))
    with GrpoTrainer(settings) as trainer:
        base = trainer.announcement()
        first = trainer.train(batch(1), 10)
    assert must_publish(base, None) and not must_publish(base, base)
    assert must_publish(first, base) and must_publish(first, None) and not must_publish(first, first)
    with pytest.raises(PublicationError, match="version 1 of policy"):
        must_publish(base, first)
    with GrpoTrainer(settings_for(tmp_path / "b", make_policy_folder(tmp_path / "n", seed=9))) as other:
        with pytest.raises(PublicationError, match="other weights"):
            must_publish(other.announcement(), base)
