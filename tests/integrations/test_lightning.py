"""The Lightning callback: patched before the strategy wraps the model, put back if asked, the same checkpoints."""

from __future__ import annotations

import logging
import sys

import pytest

lightning = pytest.importorskip("lightning.pytorch", reason="Lightning is not installed")

import torch  # noqa: E402
from torch import nn  # noqa: E402

import fusedops  # noqa: E402
from fusedops.integrations.lightning import FusedOps, _callbacks  # noqa: E402

QUIET = {
    "accelerator": "cpu",
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "max_steps": 2,
    "limit_val_batches": 1,
}


class Model(lightning.LightningModule):
    def __init__(self, late=False, fails=False):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 1))
        self.late, self.fails, self.head = late, fails, None
        self.seen = set()

    def configure_model(self):
        if self.late and self.head is None:
            self.head = nn.LayerNorm(8)

    def forward(self, x):
        return self.body(x if self.head is None else self.head(x))

    def training_step(self, batch, index):
        if self.fails:
            raise RuntimeError("no step")
        self.seen |= {type(m).__name__ for m in self.modules()}
        return self(batch[0]).square().mean()

    def validation_step(self, batch, index):
        self(batch[0])

    def predict_step(self, batch, index):
        return self(batch[0])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.fixture
def loader():
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(1))
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x), batch_size=2)


def fit(model, loader, tmp_path, *callbacks, checkpoint=None, **options):
    trainer = lightning.Trainer(
        **{**QUIET, **options}, default_root_dir=tmp_path, callbacks=list(callbacks), enable_checkpointing=False
    )
    trainer.fit(model, loader, loader, ckpt_path=checkpoint)
    return trainer


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
class TestRuns:
    def test_trains_patched_and_reports(self, loader, tmp_path, caplog):
        plain, fused = Model(), Model()
        fit(plain, loader, tmp_path)
        callback = FusedOps()
        with caplog.at_level(logging.INFO, "fusedops.integrations.lightning"):
            fit(fused, loader, tmp_path, callback)
        assert "fusedops: 2 replaced" in caplog.text
        assert [len(report.replaced) for report in callback.reports] == [2]
        assert "FusedLayerNorm" in fused.seen
        assert type(fused.body[2]).__name__ == "FusedLayerNorm"  # it stays
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(fused.state_dict()[name], value)

    def test_unpatches_what_it_patched(self, loader, tmp_path):
        model = Model()
        fusedops.patch(model.body[2])
        fit(model, loader, tmp_path, FusedOps(unpatch=True))
        assert type(model.body[0]) is nn.Linear
        assert type(model.body[2]).__name__ == "FusedLayerNorm"  # the user's own

    def test_unpatches_after_an_exception(self, loader, tmp_path):
        model = Model(fails=True)
        with pytest.raises(RuntimeError, match="no step"):
            fit(model, loader, tmp_path, FusedOps(unpatch=True))
        assert type(model.body[2]) is nn.LayerNorm

    def test_what_configure_model_makes_is_patched_too(self, loader, tmp_path):
        model, callback = Model(late=True), FusedOps(strict=True)
        fit(model, loader, tmp_path, callback)
        assert type(model.head).__name__ == "FusedLayerNorm"
        assert [len(report.replaced) for report in callback.reports] == [2, 1]

    def test_strict(self, loader, tmp_path):
        model = Model()
        model.body[1].register_forward_hook(lambda *_: None)
        with pytest.raises(fusedops.PatchError, match="would be left alone"):
            fit(model, loader, tmp_path, FusedOps(strict=True))

    def test_options_of_patch(self, loader, tmp_path):
        model, callback = Model(), FusedOps(exclude="body.2", check=torch.randn(2, 8))
        fit(model, loader, tmp_path, callback)
        assert callback.reports[0].check.max_abs_error < 1e-5
        assert [entry.path for entry in callback.reports[0].left] == ["body.2"]

    def test_what_is_ruled_out_stays_so_when_the_run_begins(self, loader, tmp_path):
        model, callback = Model(), FusedOps(exclude="body.2")
        fit(model, loader, tmp_path, callback)
        assert type(model.body[2]) is nn.LayerNorm
        assert [len(report.replaced) for report in callback.reports] == [1]

    def test_patterns_may_speak_of_what_is_made_later(self, loader, tmp_path):
        model, callback = Model(late=True), FusedOps(include="head")
        fit(model, loader, tmp_path, callback)
        assert type(model.head).__name__ == "FusedLayerNorm"
        assert type(model.body[2]) is nn.LayerNorm
        with pytest.raises(ValueError, match="fits the name of no module"):
            fit(Model(), loader, tmp_path, FusedOps(exclude="no_such"))

    def test_the_report_is_printed_unless_told_otherwise(self, loader, tmp_path, capsys):
        callback = FusedOps()
        assert callback.report is None
        fit(Model(), loader, tmp_path, callback)
        assert str(callback.report) in capsys.readouterr().out
        fit(Model(), loader, tmp_path, FusedOps(verbose=False))
        assert "fusedops:" not in capsys.readouterr().out

    @pytest.mark.parametrize(("first", "second"), [(True, False), (False, True)], ids=["to plain", "to patched"])
    def test_checkpoints_pass_between_patched_and_plain_runs(self, loader, tmp_path, first, second):
        path = tmp_path / "run.ckpt"
        one, two = Model(), Model()
        fit(one, loader, tmp_path, *[FusedOps()] * first).save_checkpoint(path)
        state = torch.load(path, weights_only=True)["state_dict"]
        assert state.keys() == Model().state_dict().keys()
        fit(two, loader, tmp_path, *[FusedOps()] * second, checkpoint=path, max_steps=4)
        plain, resumed = Model(), Model()
        fit(plain, loader, tmp_path).save_checkpoint(tmp_path / "plain.ckpt")
        fit(resumed, loader, tmp_path, checkpoint=tmp_path / "plain.ckpt", max_steps=4)
        for name, value in resumed.state_dict().items():
            torch.testing.assert_close(two.state_dict()[name], value)

    def test_predicts_patched(self, loader, tmp_path):
        model, callback = Model(), FusedOps(unpatch=True)
        expected = torch.cat([model(x) for (x,) in loader])
        trainer = lightning.Trainer(**QUIET, default_root_dir=tmp_path, callbacks=[callback])
        torch.testing.assert_close(torch.cat(trainer.predict(model, loader)), expected)
        assert callback.reports
        assert type(model.body[2]) is nn.LayerNorm


def test_options_that_do_not_exist_are_refused():
    with pytest.raises(TypeError, match="excludes"):
        FusedOps(excludes="body.2")


def test_without_lightning_the_error_names_the_package(monkeypatch):
    for name in ("lightning.pytorch", "pytorch_lightning"):
        monkeypatch.setitem(sys.modules, name, None)  # importing it fails
    with pytest.raises(ImportError, match="pip install lightning"):
        _callbacks()


def test_serves_both_packages():
    bases = {base.__module__.split(".")[0] for base in FusedOps.__mro__}
    assert "lightning" in bases
