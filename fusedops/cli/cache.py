"""``fusedops cache``: what is stored, where it is from, and how it is shared."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from fusedops.autotune.bundles import Bundle, each, merge, read_bundle, read_bundle_telling, write_bundle
from fusedops.autotune.entries import Entry, mismatches
from fusedops.autotune.identity import Identity
from fusedops.autotune.lookup import look_up, shipped_files, store
from fusedops.autotune.operator import Operator, operator_named, operators, word
from fusedops.cli.devices import facts_named
from fusedops.cli.durations import human, seconds
from fusedops.cli.output import fail, human_bytes, print_json, stderr, stdout
from fusedops.cli.problems import has, problem_of_words, short

cache = typer.Typer(
    help="Look into the stored launch configurations, and share them.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)

Op = Annotated[str | None, typer.Option("--op", help="Only this operator: norm, linear, attention and others.")]
Device = Annotated[
    str | None, typer.Option("--device", help="Only this GPU: a part of its name or of its folder's, such as H100.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]
Stale = Annotated[
    bool, typer.Option("--stale", help="Only entries that were found with another Triton or other kernels.")
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]


@cache.command("list")
def list_(op: Op = None, device: Device = None, stale: Stale = False, json: Json = False) -> None:
    """List what is stored: problem, configuration, time, gain over the default, date.

    Example: `fusedops cache list --op norm` (the norms' alone).
    """
    found = [
        (identity, entry, reasons)
        for identity, entry in each(_selected(op, device))
        for reasons in [_mismatches(entry)]
        if reasons or not stale
    ]
    if json:
        print_json(
            {
                "folder": str(store().folder),
                "entries": [
                    {"device": identity.key, "key": entry.key, "gain": _gain(entry), "stale": reasons}
                    | {name: getattr(entry, name) for name in _SHOWN}
                    for identity, entry, reasons in found
                ],
            }
        )
        return
    console = stdout()
    for message in store().verify():
        stderr().print(escape(f"left out: {message.path}: {message.what}; fusedops cache verify"), soft_wrap=True)
    for identity in dict.fromkeys(identity for identity, _, _ in found):
        if not console.is_terminal or console.width < _WIDE:
            _list_plainly(identity, [(entry, reasons) for other, entry, reasons in found if other == identity])
            continue
        table = Table(title=escape(_device_title(identity)), title_justify="left")
        for column in ("operator", "problem", "configuration", "source", "time", "gain", "found"):
            table.add_column(column, overflow="fold", no_wrap=column not in ("problem", "configuration"))
        for other, entry, reasons in found:
            if other == identity:
                table.add_row(
                    entry.op,
                    escape(short(entry.key)),
                    _config_text(entry.config),
                    entry.source,
                    human(entry.median),
                    _gain_text(entry),
                    entry.date[:10] + (" [yellow]stale[/]" if reasons else ""),
                )
        console.print(table)
    if not found:
        matching = " that matches" if op or device or stale else ""
        console.print(f"Nothing is stored{matching} in {store().folder}", soft_wrap=True)
        told = "fusedops autotune fills it; what ships with fusedops: fusedops cache list-shipped"
        console.print(told, soft_wrap=True)


# Columns that the table needs.
_WIDE = 120


def _list_plainly(identity: Identity, entries: list[tuple[Entry, list[str]]]) -> None:
    """A device's entries for a pipe or a narrow terminal: two lines each."""
    console = stdout()
    console.print(f"[bold]{escape(_device_title(identity))}[/]", soft_wrap=True)
    for entry, reasons in entries:
        console.print(escape(f"{entry.op} {short(entry.key)}"), soft_wrap=True)
        told = [_config_text(entry.config), entry.source, human(entry.median), _gain_text(entry), entry.date[:10]]
        console.print("    " + ", ".join(told + ["[yellow]stale[/]"] * bool(reasons)), soft_wrap=True)


_SHOWN = ("op", "problem", "config", "source", "median", "spread", "default", "default_median", "date", "versions")


@cache.command("list-shipped")
def list_shipped(json: Json = False) -> None:
    """List the GPUs that configurations ship for, and how many there are of each source.

    Example: `fusedops cache list-shipped --json` (with the files' names).
    """
    rows = []
    for path in shipped_files():
        for identity, found in read_bundle(path):
            entries = [entry for part in found.values() for entry in part.values()]
            tuned = sum(entry.source == "tuned" for entry in entries)
            rows.append(
                {
                    "file": path.name,
                    "device": identity.name,
                    "arch": identity.arch,
                    "tuned": tuned,
                    "heuristic": len(entries) - tuned,
                }
            )
    if json:
        print_json({"shipped": rows})
        return
    table = Table("file", "GPU", "architecture", "tuned", "heuristic", title="Shipped", title_justify="left")
    for row in rows:
        table.add_row(*(str(value) for value in row.values()))
    stdout().print(table)


_SHOWN_CANDIDATES = 10


@cache.command()
def show(
    words: Annotated[list[str], typer.Argument(help="Words that the entry's line has, such as norm width=4096.")],
    device: Device = None,
    every: Annotated[bool, typer.Option("--all", help="Every candidate, not the first ten.")] = False,
    json: Json = False,
) -> None:
    """Show entries in full: versions, and every candidate that was tried with its time or why it has none.

    Example: `fusedops cache show norm width=4096` (of the norms 4096 wide).
    """
    found = [
        (identity, entry)
        for identity, entry in each(_selected(None, device))
        if all(word == entry.op or has(entry.key, word) for word in words)
    ]
    if not found:
        raise fail(f"no entry has {' '.join(words)}; fusedops cache list shows all")
    if json:
        print_json({"entries": [{"device": identity.to_json(), **entry.to_json()} for identity, entry in found]})
        return
    console = stdout()
    for identity, entry in found:
        console.print(f"[bold]{entry.op}[/] {escape(entry.key)}\n  on {escape(_device_title(identity))}")
        table = Table(show_header=False)
        table.add_row("configuration", _config_text(entry.config))
        table.add_row("time", f"{human(entry.median)} ± {human(entry.spread)}")
        table.add_row("default", f"{_config_text(entry.default)}, {human(entry.default_median)}")
        table.add_row("gain", _gain_text(entry))
        table.add_row("found", f"{entry.date} ({entry.source})")
        table.add_row("with", ", ".join(f"{name} {version or 'none'}" for name, version in entry.versions.items()))
        table.add_row("still holds", "; ".join(_mismatches(entry)) or "yes")
        console.print(table)
        if entry.candidates:
            table = Table("candidate", "outcome", "time", "spread", "why", title="Candidates", title_justify="left")
            tried = sorted(entry.candidates, key=lambda c: (c.median is None, c.median or 0.0))
            for candidate in tried if every else tried[:_SHOWN_CANDIDATES]:
                table.add_row(
                    _config_text(candidate.config),
                    candidate.outcome,
                    human(candidate.median),
                    human(candidate.spread),
                    escape(candidate.reason or ""),
                )
            console.print(table)
            if not every and len(tried) > _SHOWN_CANDIDATES:
                console.print(f"{len(tried) - _SHOWN_CANDIDATES} more: --all", soft_wrap=True)


@cache.command()
def path(json: Json = False) -> None:
    """Print the folder of the store, and what is in it.

    Example: `fusedops cache path` (what to mount into a container).
    """
    folder = store().folder
    files = [file for file in folder.rglob("*.json") if file.is_file()] if folder.is_dir() else []
    if json:
        print_json({"folder": str(folder), "files": len(files), "bytes": sum(f.stat().st_size for f in files)})
        return
    stdout().print(str(folder), soft_wrap=True)
    stderr().print(f"{len(files)} files, {human_bytes(sum(file.stat().st_size for file in files))}")


@cache.command()
def explain(
    op: Annotated[str, typer.Argument(help="The operator: norm, linear, attention and others.")],
    fields: Annotated[list[str], typer.Argument(help="The problem: name=value, or name for a flag.")],
    target: Annotated[
        str | None,
        typer.Option("--target", help="A GPU that is not here: H100, sm_90, … Default: this machine's."),
    ] = None,
    json: Json = False,
) -> None:
    """Say which source answers a problem, and field by field why the others do not.

    Example: `fusedops cache explain norm width=4096 itemsize=2 direction=forward kind=rms --target H100`
    (one problem on one GPU).
    """
    operator = _operator(op)
    try:
        problem = problem_of_words(operator, fields)
        facts = facts_named(target)
    except (ValueError, RuntimeError) as error:
        raise fail(str(error)) from None
    impossible = operator.impossible(problem, facts)
    if impossible is not None:
        raise fail(f"no call meets such a problem: {impossible}")
    found = look_up(operator, problem, facts)
    others = list(_differences(operator, problem, Identity.of(facts)))
    if json:
        print_json(
            {
                "op": op,
                "problem": operator.problem_json(problem),
                "device": Identity.of(facts).to_json(),
                "source": found.source,
                "exact": found.exact,
                "config": found.config.to_json(),
                "entry": None if found.entry is None else found.entry.to_json(),
                "stale": list(found.stale),
                "asked": [{"source": a.source, "key": a.key, "reason": a.reason or "answers"} for a in found.attempts],
                "others": others,
            }
        )
        return
    console = stdout()
    console.print(f"[bold]{op}[/] {escape(operator.key(problem))}\n  on {escape(_device_title(Identity.of(facts)))}")
    console.print(f"  [bold green]{escape(found.source)}[/] answers: {_config_text(found.config.to_json())}")
    if found.entry is not None:
        console.print(
            f"  {found.entry.source}, found {found.entry.date}, {human(found.entry.median)}, {_gain_text(found.entry)}"
        )
        if not found.exact:
            console.print(f"  it was found for: {escape(found.entry.key)}")
    for reason in found.stale:
        console.print(f"  [yellow]stale:[/] {escape(reason)}")
    table = Table("asked", "entry", "answer", title="Sources, in their order", title_justify="left")
    for attempt in found.attempts:
        table.add_row(
            escape(attempt.source),
            escape(short(attempt.key) if attempt.key else "–"),
            escape(attempt.reason or "answers"),
        )
    if found.entry is None:
        table.add_row("default", "–", "answers")
    console.print(table)
    if others:
        table = Table("entry of", "differs in", title="The nearest entry of each device", title_justify="left")
        for other in others:
            table.add_row(escape(f"{other['source']}: {other['device']}"), escape("; ".join(other["differences"])))
        console.print(table)


@cache.command()
def diff(
    first: Annotated[str, typer.Argument(help='An exported file, or "store" or "shipped".')],
    second: Annotated[str, typer.Argument(help='Another; default: "store".')] = "store",
    json: Json = False,
) -> None:
    """Compare two sets of configurations: what only one has, and where they differ.

    Example: `fusedops cache diff team.json store` (what is stored here and not in the file, and the other way round).
    """
    a, b = ({(i, e.op, e.key): e for i, e in each(_named(name))} for name in (first, second))
    rows: list[dict[str, Any]] = []
    for key in sorted({*a, *b}, key=lambda item: (item[0].key, *item[1:])):
        identity, op, problem = key
        left, right = a.get(key), b.get(key)
        if left is not None and right is not None and left.config == right.config:
            continue
        rows.append(
            {
                "device": identity.key,
                "op": op,
                "problem": problem,
                **{
                    side: None if e is None else {"config": e.config, "median": e.median, "source": e.source}
                    for side, e in (("first", left), ("second", right))
                },
            }
        )
    same = len({*a} & {*b}) - sum(row["first"] is not None and row["second"] is not None for row in rows)
    if json:
        print_json({"same": same, "different": rows})
        return
    console = stdout()
    if rows:
        table = Table("device", "problem", first, second)
        for row in rows:
            table.add_row(
                row["device"],
                escape(f"{row['op']} {short(row['problem'])}"),
                *(
                    "–" if e is None else f"{_config_text(e['config'])}\n{human(e['median'])} ({e['source']})"
                    for e in (row["first"], row["second"])
                ),
            )
        console.print(table)
    console.print(f"{len(rows)} differ, {same} are the same.")


@cache.command("export")
def export_(
    file: Annotated[Path, typer.Argument(help="The file to write.")],
    op: Op = None,
    device: Device = None,
) -> None:
    """Write what is stored to one file: to commit, to import elsewhere, or to name in FUSEDOPS_CONFIG_PATH.

    Example: `fusedops cache export team.json --device H100` (of one kind of GPU).
    """
    bundle = _selected(op, device)
    if not bundle:
        raise fail(f"nothing is stored that could be exported, in {store().folder}")
    _write(file, bundle)
    _count(bundle, f"written to {file}")


@cache.command("import")
def import_(files: Annotated[list[Path], typer.Argument(help="Files that fusedops cache export wrote.")]) -> None:
    """Add the entries of exported files to the store; of two for one problem the better stays.

    Example: `fusedops cache import team.json` (what someone else has exported).
    """
    bundle: Bundle = []
    refused = 0
    read: list[Bundle] = []
    for file in files:
        try:
            part, wrong = read_bundle_telling(file)
        except (OSError, ValueError) as error:
            raise fail(f"{file}: {getattr(error, 'strerror', None) or error}") from None
        read.append(part)
        refused += len(wrong)
        for reason in wrong:
            stderr().print(escape(f"left out: {file}: {reason}"), soft_wrap=True)
    for identity, found in merge(*read):
        good: dict[str, dict[str, Entry]] = {}
        for op, entries in found.items():
            for key, entry in entries.items():
                what = _unusable(entry, identity)
                if what is None:
                    good.setdefault(op, {})[key] = entry
                else:
                    refused += 1
                    stderr().print(escape(f"left out: {identity.name}: {op} {key}: {what}"), soft_wrap=True)
        bundle.append((identity, good))
    before = {(i, e.op, e.key): e for i, e in each(store().bundle())}
    if not store().add(bundle):
        raise fail(f"{store().folder} cannot be written; nothing was imported")
    after = {(i, e.op, e.key): e for i, e in each(store().bundle())}
    added = len(after) - len(before)
    better = sum(after[key] != entry for key, entry in before.items())
    same = sum(1 for _ in each(bundle)) - added - better
    told = f"{added} added, {better} improved, {same} left as they were, {refused} refused, in {store().folder}"
    stdout().print(told, soft_wrap=True)
    if refused:
        raise typer.Exit(1)


@cache.command("merge")
def merge_(
    output: Annotated[Path, typer.Argument(help="The file to write.")],
    files: Annotated[list[Path], typer.Argument(help="Files that fusedops cache export wrote.")],
) -> None:
    """Merge exported files into one; of two entries for one problem the better stays. The store is left alone.

    Example: `fusedops cache merge all.json a.json b.json` (two machines' exports in one file).
    """
    bundle = merge(*map(_read, files))
    _write(output, bundle)
    _count(bundle, f"written to {output}")


@cache.command()
def verify(
    files: Annotated[list[Path] | None, typer.Argument(help="Exported files; default: the store.")] = None,
    json: Json = False,
) -> None:
    """Check the store, or exported files: that each can be read, and each entry serves its problem on its device.

    The exit code is 1 when something is wrong.

    Example: `fusedops cache verify team.json` (before it is shared).
    """
    wrong: list[dict[str, Any]] = []
    if files:
        checked = 0
        for file in files:
            try:
                bundle, left_out = read_bundle_telling(file)
            except (OSError, ValueError) as error:
                wrong.append({"path": str(file), "key": None, "what": str(error)})
                continue
            wrong += ({"path": str(file), "key": None, "what": what} for what in left_out)
            for identity, entry in each(bundle):
                checked += 1
                what = _unusable(entry, identity)
                if what is not None:
                    wrong.append({"path": str(file), "key": f"{entry.op} {entry.key}", "what": what})
    else:
        wrong = [
            {"path": str(found.path), "key": found.key, "what": found.what} for found in store().verify(operators())
        ]
        known = {(item["path"], item["key"]) for item in wrong}
        checked = 0
        for identity, entry in each(store().bundle()):
            checked += 1
            what, path = _unusable(entry, identity), str(store().path(identity, entry.op))
            if what is not None and (path, entry.key) not in known:
                wrong.append({"path": path, "key": entry.key, "what": what})
    if json:
        print_json({"checked": checked, "wrong": wrong})
    else:
        for item in wrong:
            stdout().print(
                f"[bold red]wrong:[/] {escape(': '.join(str(v) for v in item.values() if v))}", soft_wrap=True
            )
        stdout().print(f"{checked} entries were read; {len(wrong) or 'nothing'} wrong.")
    if wrong:
        raise typer.Exit(1)


@cache.command()
def prune(
    older_than: Annotated[
        str | None, typer.Option("--older-than", help="Entries that were found longer ago, such as 90d or 12h.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
    json: Json = False,
) -> None:
    """Remove entries that are of no use any more: of other kernels or another Triton, or that nothing reads.

    Example: `fusedops cache prune --older-than 90d --dry-run` (says what would go, and removes nothing).
    """
    age = None if older_than is None else timedelta(seconds=seconds(older_than))
    try:
        removed = store().prune(operators(), older_than=age, dry_run=dry_run)
    except OSError as error:
        raise fail(f"the store cannot be written: {error}") from None
    if json:
        print_json(
            {
                "removed": [
                    {"device": item.identity.key, "op": item.op, "key": item.key, "why": item.why} for item in removed
                ],
                "dry_run": dry_run,
            }
        )
        return
    for item in removed:
        stdout().print(escape(f"{item.identity.name}: {item.op} {item.key}: {item.why}"), soft_wrap=True)
    stdout().print(f"{len(removed)} entries {'would be' if dry_run else 'were'} removed.")


@cache.command()
def clear(op: Op = None, device: Device = None, yes: Yes = False) -> None:
    """Remove everything that is stored, or what is stored of an operator or a GPU.

    Example: `fusedops cache clear --device H100` (one kind of GPU).
    """
    bundle = _selected(op, device)
    count = sum(1 for _ in each(bundle))
    if not yes:
        typer.confirm(f"Remove {count} entries from {store().folder}?", abort=True)
    try:
        if device is None:
            store().clear(op=op)
        else:
            for identity, _ in bundle:
                store().clear(identity, op)
    except OSError as error:
        raise fail(f"the store cannot be written: {error}") from None
    stdout().print(f"{count} entries were removed.")


def _selected(op: str | None, device: str | None) -> Bundle:
    if op is not None:
        _operator(op)
    wanted = (device or "").lower()
    return [
        (identity, found)
        for identity, found in store().bundle(op=op)
        if wanted in identity.name.lower() or wanted in identity.key.lower()
    ]


def _operator(name: str) -> Operator:
    try:
        return operator_named(name)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def _named(name: str) -> Bundle:
    if name == "store":
        return store().bundle()
    if name == "shipped":
        return merge(*map(_read, shipped_files()))
    return _read(Path(name))


def _read(path: Path) -> Bundle:
    try:
        return read_bundle(path)
    except (OSError, ValueError) as error:
        raise fail(f"{path}: {getattr(error, 'strerror', None) or error}") from None


def _write(path: Path, bundle: Bundle) -> None:
    try:
        write_bundle(path, bundle)
    except (OSError, ValueError) as error:
        raise fail(f"{path}: {getattr(error, 'strerror', None) or error}") from None


def _count(bundle: Bundle, what: str) -> None:
    devices = {identity.name for identity, _ in bundle}
    stdout().print(f"{sum(1 for _ in each(bundle))} entries of {len(devices)} GPUs {what}", soft_wrap=True)


def _mismatches(entry: Entry) -> list[str]:
    known = operators().get(entry.op)
    return [f"there is no operator {entry.op}"] if known is None else mismatches(entry, known)


def _unusable(entry: Entry, identity: Identity) -> str | None:
    """Why an entry's configuration cannot serve its problem on its device, as a look-up would say; None: it can."""
    facts = identity.facts()
    try:
        operator = operator_named(entry.op)
        problem = operator.problem_from_json(entry.problem)
        config = operator.config.from_json(entry.config)
    except ValueError as error:
        return str(error)
    return operator.impossible(problem, facts) or operator.unfit(config, problem, facts)


def _differences(operator: Operator, problem: Any, here: Identity) -> Iterator[dict[str, Any]]:
    """Of each device that has entries, the one that differs in the fewest fields, and in which."""
    wanted = operator.problem_json(problem)
    sources = [("your store", store().bundle(op=operator.name))]
    sources += [("shipped", read_bundle(path)) for path in shipped_files()]
    for source, bundle in sources:
        for identity, found in bundle:
            entries = found.get(operator.name, {})
            if not entries:
                continue
            best = min(entries.values(), key=lambda entry: len(_fields_apart(wanted, entry.problem)))
            apart = [*_identity_apart(here, identity)]
            apart += _fields_apart(wanted, best.problem) if identity.arch == here.arch else []
            if apart:
                yield {"source": source, "device": identity.name, "key": best.key, "differences": apart}


def _fields_apart(wanted: Mapping[str, Any], there: Mapping[str, Any]) -> list[str]:
    names = dict.fromkeys((*wanted, *there))
    return [
        f"{name}: {word(there.get(name))} there, {word(wanted.get(name))} asked"
        for name in names
        if wanted.get(name) != there.get(name)
    ]


def _identity_apart(here: Identity, there: Identity) -> Iterable[str]:
    if here.arch != there.arch:
        return [f"another architecture: {there.arch}"]
    a, b = here.to_json(), there.to_json()
    return [f"GPU's {name}: {b[name]} there, {a[name]} here" for name in a if a[name] != b[name]]


def _device_title(identity: Identity) -> str:
    parts = [identity.name, identity.arch, f"{identity.multiprocessors} multiprocessors"]
    parts += [f"{identity.memory_gb} GB"] if identity.memory_gb else []
    parts += [f"MIG {identity.mig}"] if identity.mig else []
    return ", ".join(parts)


def _config_text(config: Mapping[str, Any]) -> str:
    """What is not off: ``block_m=64 num_warps=4``."""
    return escape(" ".join(f"{name}={value}" for name, value in config.items() if value not in (False, "", None)))


def _gain(entry: Entry) -> float | None:
    """How many times as fast as the default."""
    if entry.median is None or entry.default_median is None:
        return None
    return round(entry.default_median / entry.median, 4)


def _gain_text(entry: Entry) -> str:
    gain = _gain(entry)
    if gain is None:
        return "not measured"
    return "the default is best" if entry.config == entry.default else f"{gain:.2f} times the default's speed"
