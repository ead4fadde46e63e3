"""`edge-llm cache stats|clear|verify`: what is kept on disk of the conversations of this user, and what was left behind."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from edge_llm.errors import InputError, IntegrityError
from edge_llm_cli import console
from edge_llm_cli.models import JsonOption

app = typer.Typer(no_args_is_help=True, help="Look at, empty and check the prefix cache on disk.")


@app.command()
def stats(as_json: JsonOption = False) -> None:
    """Show the folder, and how much is kept in it; and what else the cache folder holds."""
    from edge_llm.cache.block_folder import folder_stats, prefix_folder
    from edge_llm.config import load_config
    from edge_llm.install.leftovers import sizes

    config = load_config(defaults={"prefix_cache": "disk"})
    folder = prefix_folder()
    found, others = folder_stats(folder), sizes()
    if as_json:
        console.data(
            {
                "folder": str(folder),
                "files": found.files,
                "bytes": found.size,
                "budget": config.prefix_cache_bytes,
                "on": config.stores_prefixes,
                "others": others,
            }
        )
        return
    budget = console.megabytes(config.prefix_cache_bytes)
    console.table(
        [
            ("folder", str(folder)),
            ("blocks", str(found.files)),
            ("size", f"{console.megabytes(found.size)} of {budget}"),
            ("run and chat", "write to it" if config.stores_prefixes else "leave nothing in it (config)"),
            *(
                (kind.replace("leftovers", "left behind"), console.megabytes(size))
                for kind, size in others.items()
                if size
            ),
        ]
    )


@app.command()
def clear(
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Delete everything that is kept of conversations, and what processes that died have left."""
    from edge_llm.cache.block_folder import clear_folder, prefix_folder
    from edge_llm.install.leftovers import clear_leftovers

    if not yes:
        if not console.is_terminal(sys.stdin):
            raise InputError("this deletes the prefix cache", hint="edge-llm cache clear --yes")
        if not console.agreed(f"delete all blocks in {prefix_folder()}?"):
            return
    gone, others = clear_folder(prefix_folder()), clear_leftovers()
    if as_json:
        console.data({"files": gone.files, "bytes": gone.size, "leftovers": others})
    else:
        deleted = console.counted(gone.files, "block is deleted", "blocks are deleted")
        console.line(f"{deleted}, {console.megabytes(gone.size + others)} are free again")


@app.command()
def verify(as_json: JsonOption = False) -> None:
    """Read every block, and delete those that are damaged."""
    from edge_llm.cache.block_folder import prefix_folder, verify_folder

    found = verify_folder(prefix_folder())
    if as_json:
        console.data({"files": found.files, "bytes": found.size, "damaged": found.damaged})
    else:
        blocks = console.counted(found.files, "block", "blocks")
        console.line(f"{blocks}, {console.megabytes(found.size)}, {found.damaged} of them damaged and deleted")
    if found.damaged:
        damaged = console.counted(found.damaged, "block was damaged", "blocks were damaged")
        raise IntegrityError(f"{damaged} and deleted", hint="is the disk sound?")
