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
from collections.abc import Iterable
from typing import Any

from fusedops.integrations.patches import Patches, tell
from fusedops.patching.patcher import Patterns, fits
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


def _listed(patterns: Patterns) -> list[str] | None:
    return [patterns] if isinstance(patterns, str) else None if patterns is None else list(patterns)


def _fitting(module: Any, patterns: Iterable[str] | None) -> list[str] | None:
    """Those patterns that fit the name of a module now."""
    if patterns is None:
        return None
    paths = [path for path, _ in module.named_modules()]
    return [pattern for pattern in patterns if fits(pattern, paths)]


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
        include, exclude: as for :func:`fusedops.patch`, with names as the LightningModule has them ("model.encoder.*").
            A pattern may speak of what is made after ``setup``.
        check: as for :func:`fusedops.patch`; the model runs on it in ``setup``.

    Attributes:
        reports: of each patching in the last run that replaced something.

    Raises:
        PatchError, TypeError, ValueError: when a run starts, as :func:`fusedops.patch`.

    Examples:
        >>> from fusedops.integrations.lightning import FusedOps
        >>> callback = FusedOps(unpatch=True, exclude="*.lm_head")
        >>> trainer = Trainer(callbacks=[callback])  # doctest: +SKIP
        >>> callback.reports  # nothing has run
        []
    """

    def __init__(
        self,
        *,
        unpatch: bool = False,
        verbose: bool = True,
        strict: bool = False,
        include: Patterns = None,
        exclude: Patterns = None,
        check: Any = None,
    ) -> None:
        super().__init__()
        self._verbose = verbose
        self._include, self._exclude = _listed(include), _listed(exclude)
        self.reports: list[PatchReport] = []
        self._strict = strict
        self._check = check
        self._patches = Patches(unpatch)
        self._begun = False
        self._fitted: set[str] = set()

    @property
    def report(self) -> PatchReport | None:
        """The last of :attr:`reports`; None before."""
        return self.reports[-1] if self.reports else None

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self.reports = []
        self._begun = False
        include, exclude = _fitting(pl_module, self._include), _fitting(pl_module, self._exclude)
        self._fitted = {*(include or ()), *(exclude or ())}
        if include != []:
            self._patch(trainer, pl_module, include=include, exclude=exclude or None, check=self._check)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        if not self._begun:  # a fit also validates, again and again
            self._begun = True
            lost = self._fitted.difference(_fitting(pl_module, self._fitted) or ())
            if lost and not self._strict:
                return  # the strategy has given modules other names (FSDP1 does): the patterns say nothing any more
            self._patch(trainer, pl_module, include=self._include, exclude=self._exclude, strict=self._strict)

    on_validation_start = on_test_start = on_predict_start = on_fit_start

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._patches.put_back()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._patches.put_back()

    def _patch(self, trainer: Any, pl_module: Any, **options: Any) -> None:
        report = self._patches.patch(pl_module, **options)
        if report.replaced:
            self.reports.append(report)
            if trainer.is_global_zero:
                tell(report, _log, self._verbose)
