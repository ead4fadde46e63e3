"""`edge-llm pull`, `import` and `models list|show|verify|rm`: what is on this machine."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edge_llm.errors import InputError, ModelFormatError, ModelNotFoundError, OutdatedModelError
from edge_llm_cli import console
from edge_llm_cli.progress import ProgressDisplay
from edge_llm_cli.wording import Sections

if TYPE_CHECKING:
    from edge_llm.install.store import ModelStore
    from edge_llm.model.manifest import SourceSpec

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
INSTALLED = "installed"
"""the state of a model that can be used"""
NameArgument = Annotated[str, typer.Argument(help="Name of an installed model.")]

app = typer.Typer(no_args_is_help=True, help="List, show, verify and remove models.")


def pull(
    name: Annotated[str, typer.Argument(help="Name of a model of the catalog.")],
    as_json: JsonOption = False,
) -> None:
    """Download a model of the catalog and import it, unless it is installed."""
    from edge_llm.install import importer

    with ProgressDisplay() as progress:
        folder = importer.pull(name, progress)
    _show_installed(folder, as_json)


def import_(
    file: Annotated[Path, typer.Argument(help="A FILE.gguf.")],
    name: Annotated[str | None, typer.Option(help="Name to give it; default: from the file's name and digest.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Import a GGUF file into the store of models. The file itself is not needed afterwards."""
    from edge_llm.install import importer

    with ProgressDisplay() as progress:
        folder = importer.import_file(file, progress, name=name)
    _show_installed(folder, as_json)


def _show_installed(folder: Path, as_json: bool) -> None:
    from edge_llm.model.manifest import ModelManifest

    source = ModelManifest.read(folder).source
    if as_json:
        console.data({"name": folder.name, "folder": str(folder), "fidelity": dict(source.fidelity)})
        return
    console.line(f"{folder.name} is installed in {folder}")
    if source.tensor_types:
        console.line(f"weights: {_weights(source)}")


def _weights(source: SourceSpec) -> str:
    """How many matrices of each type there are, and how exactly they are kept."""
    return ", ".join(f"{n} {kind} ({source.fidelity.get(kind, '?')})" for kind, n in source.tensor_types.items())


@app.command("list", short_help="Show what is installed, and what can be pulled.")
def list_(as_json: JsonOption = False) -> None:
    """Show the installed models, and those of the catalog that can be pulled."""
    from edge_llm.install import catalog
    from edge_llm.install.store import ModelStore

    store = ModelStore()
    installed = [summary(store, name) for name in store.names()]
    available = [catalog.get(name) for name in catalog.names() if not store.has(name)]
    if as_json:
        others = [{"name": recipe.name, "download": recipe.source.download_size} for recipe in available]
        console.data({"installed": installed, "available": others})
        return
    rows = [(m["name"], console.megabytes(m["size"]), _context(m["context"]), m["state"]) for m in installed]
    rows += [(r.name, console.megabytes(r.source.download_size), _context(r.context), "to pull") for r in available]
    console.table(rows)
    for model in installed:
        if model["remedy"]:
            console.note(f"hint: {model['name']}: {model['remedy']}")


def _context(tokens: int | None) -> str:
    return "" if tokens is None else f"context {tokens}"


def summary(store: ModelStore, name: str) -> dict[str, Any]:
    """Name, size, architecture, context and state of an installed model, and what to do where it is not `INSTALLED`; sizes are
    checked, digests are not."""
    from edge_llm.install import catalog
    from edge_llm.model.manifest import IMPORT_AGAIN, ModelManifest
    from edge_llm.model.verify import verify

    again = f"edge-llm pull {name}" if catalog.has(name) else f"import its file again, with --name {name}"
    again += f", or remove it: edge-llm models rm {name}"
    known = {"name": name, "size": store.size(name), "architecture": None, "context": None, "remedy": again}
    try:
        manifest = ModelManifest.read(store.path(name))
        report = verify(store.path(name), digests=False)
    except OutdatedModelError:
        return {**known, "state": "older format: import again"}
    except ModelFormatError as error:
        remedy = again if error.hint in (None, IMPORT_AGAIN) else error.hint
        return {**known, "state": f"damaged: {error}", "remedy": remedy}
    known |= {"architecture": manifest.architecture, "context": manifest.dimensions.context}
    if not report.ok:
        return {**known, "state": f"damaged: {report.summary()}"}
    return {**known, "state": INSTALLED, "remedy": None}


@app.command(cls=Sections)
def show(name: NameArgument, as_json: JsonOption = False) -> None:
    """Show what the manifest of a model says."""
    from edge_llm.model.manifest import ModelManifest

    store, folder = _installed(name)
    manifest = ModelManifest.read(folder)
    if as_json:
        console.data({**dataclasses.asdict(manifest), "folder": str(folder)})
        return
    size, source = manifest.dimensions, manifest.source
    facts = {
        "name": manifest.name,
        "folder": str(folder),
        "size": console.megabytes(store.size(name)),
        "architecture": f"{manifest.architecture}, {len(manifest.layers)} layers, vocabulary {size.vocab}",
        "context": f"{size.context} tokens",
        "layout": f"{manifest.layout}, keys and values {manifest.kv_type}",
        "source": f"{source.file}, sha256 {source.sha256}",
        "weights": _weights(source),
        "system": manifest.system_prompt or "",
        "sampling": ", ".join(f"{key} {value}" for key, value in manifest.sampling.items()),
        "quality": ", ".join(f"{key} {value}" for key, value in manifest.quality.items()),
        "license": manifest.license or "",
    }
    console.table([(label, text) for label, text in facts.items() if text])


@app.command(cls=Sections)
def verify(name: NameArgument, as_json: JsonOption = False) -> None:
    """Compare every byte of a model with the digests in its manifest."""
    from edge_llm.model.verify import verify as compare

    _, folder = _installed(name)
    with ProgressDisplay() as progress:
        report = compare(folder, progress)
    if as_json:
        console.data({"name": name, "ok": report.ok, "files": report.files, "extra": report.extra})
    else:
        console.table([*report.files.items(), *((extra, "not part of the model") for extra in report.extra)])
    report.raise_if_damaged()


@app.command(cls=Sections)
def rm(
    name: NameArgument,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Delete a model from this machine."""
    from edge_llm.install.store import ModelStore

    store = ModelStore()
    folder = store.path(name)
    if folder.is_dir() and not yes:
        if not console.is_terminal(sys.stdin):
            raise InputError(f"this deletes the model {name}", hint=f"edge-llm models rm {name} --yes")
        if not console.agreed(f"delete {folder} ({console.megabytes(store.size(name))})?"):
            return
    freed = store.remove(name)
    if as_json:
        console.data({"name": name, "freed": freed})
    else:
        console.line(f"{name} is removed, {console.megabytes(freed)} are free again")


def _installed(name: str) -> tuple[ModelStore, Path]:
    from edge_llm.install import catalog
    from edge_llm.install.store import ModelStore

    store = ModelStore()
    if not store.has(name):
        if catalog.has(name):
            raise ModelNotFoundError(f"the model {name} is not installed", hint=f"edge-llm pull {name}")
        raise catalog.unknown_model(name, [*store.names(), *catalog.names()])
    return store, store.path(name)
