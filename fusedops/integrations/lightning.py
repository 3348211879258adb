"""A Lightning callback that patches the model before training starts.

    from fusedops.integrations.lightning import FusedOps

    trainer = Trainer(callbacks=[FusedOps()])

Both packages are served, ``lightning`` and ``pytorch_lightning``: the callback belongs to those that the program has
imported before this module, or else to all that are installed.
"""

from __future__ import annotations

import importlib
import logging
import sys
from contextlib import ExitStack
from typing import Any

from fusedops.patching import patcher
from fusedops.patching.report import PatchReport

_PACKAGES = ("lightning.pytorch", "pytorch_lightning")
_log = logging.getLogger(__name__)


def _callbacks() -> tuple[type, ...]:
    """The packages' base classes of callbacks."""
    names = [name for name in _PACKAGES if sys.modules.get(name) is not None]
    if not names:
        for name in _PACKAGES:
            try:
                importlib.import_module(name)
                names.append(name)
            except ImportError:
                continue
    if not names:
        raise ImportError("fusedops.integrations.lightning needs Lightning: pip install lightning")
    return tuple(sys.modules[name].Callback for name in names)


class FusedOps(*_callbacks()):  # type: ignore[misc]
    """Lets the model call fusedops' operators: :func:`fusedops.patch` when a run (fit, validate, test, predict) starts.

    It patches in ``setup``, before the strategy (DDP, FSDP) wraps the model, and once more when the run begins, for
    what the module's own ``setup`` and ``configure_model`` have made since. What was replaced is printed on rank zero,
    logged (logger ``fusedops.integrations.lightning``, level INFO) and kept as :attr:`reports`. Checkpoints hold what
    they always held: one that was saved in a patched run loads in a plain one, and the other way round.

    Args:
        unpatch: put back what this has patched when the run ends, also by an exception.
        strict: when the run begins, raise PatchError where nothing can be replaced, or something that was recognised
            is left alone.
        verbose: whether to print the reports, or only log them.
        include, exclude, check: as for :func:`fusedops.patch`; ``check`` for the patching in ``setup``.

    Attributes:
        reports: of each patching in the last run that replaced something.

    Example:
        >>> from fusedops.integrations.lightning import FusedOps
        >>> FusedOps(unpatch=True).reports
        []
    """

    def __init__(
        self,
        *,
        unpatch: bool = False,
        verbose: bool = True,
        strict: bool = False,
        include: Any = None,
        exclude: Any = None,
        check: Any = None,
    ) -> None:
        super().__init__()
        self._verbose = verbose
        self._chosen = {"include": include, "exclude": exclude}
        self.reports: list[PatchReport] = []
        self._strict = strict
        self._check = check
        self._unpatch = unpatch
        self._patched: ExitStack | None = None
        self._begun = False

    @property
    def report(self) -> PatchReport | None:
        """The last of :attr:`reports`; None before."""
        return self.reports[-1] if self.reports else None

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self.reports = []
        self._begun = False
        if self._unpatch:
            self._patched = ExitStack()
        self._patch(trainer, pl_module, {"check": self._check})

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        if not self._begun:  # a fit also validates, again and again
            self._begun = True
            self._patch(trainer, pl_module, {"strict": self._strict})

    on_validation_start = on_test_start = on_predict_start = on_fit_start

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._put_back()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._put_back()

    def _patch(self, trainer: Any, pl_module: Any, options: dict[str, Any]) -> None:
        if self._patched is None:
            report = patcher.patch(pl_module, **self._chosen, **options)
        else:
            report = self._patched.enter_context(patcher.patched(pl_module, **self._chosen, **options))
        if report.replaced:
            self.reports.append(report)
            if trainer.is_global_zero:
                _log.info("%s", report)
                if self._verbose:
                    print(report)

    def _put_back(self) -> None:
        if self._patched is not None:
            self._patched.close()
            self._patched = None
