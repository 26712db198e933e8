"""The commands that start nothing: what is configured, what Serve would be asked for, what is wrong with a host."""

import sys
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
import typer
import yaml
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from cluster import config, doctor_facts, flags, serve_schema
from cluster.announce import Announcement, Terminal
from cluster.config import ClusterConfig
from cluster.config_sources import Settings
from cluster.doctor import diagnose
from cluster.launch import with_model

config_app = typer.Typer(no_args_is_help=True, help="What is configured, by file, environment and flags.")

out = Console(width=None if sys.stdout.isatty() else 160)
err = Console(stderr=True)


def settings(given: Mapping[str, Any]) -> Settings:
    """Of the flags that `flags.taken` gives a command, and of every other source."""
    return Settings(given.get("config_file"), config.environment(), flags.values(given))


@config_app.command("show")
@flags.taken
def config_show(
    as_json: Annotated[bool, typer.Option("--json", help="For programs.", show_default="no")] = False, **given: Any
) -> None:
    """Every setting, its value, and where that comes from; secrets are hidden."""
    rows = settings(given).rows()
    if as_json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(rows), indent=2).decode() + "\n")
        return
    table = Table("setting", "value", "from", box=None)
    for row in rows:
        table.add_row(row.path, msgspec.json.encode(row.value).decode(), row.source)
    out.print(table, highlight=False, markup=False)


@config_app.command("check")
@flags.taken
def config_check(**given: Any) -> None:
    """Exit code 1, and every problem on a line of its own, where `pronghorn up` would refuse these settings."""
    settings(given).config()
    out.print("nothing is wrong with these settings", highlight=False)


def print_serve_config(wanted: ClusterConfig) -> None:
    terminal = Terminal(err)
    with terminal.failing():
        found = with_model(wanted, terminal)
    schema = serve_schema.for_others(found)
    if not schema["applications"][0]["args"]["redis_url"]:
        terminal(
            Announcement("note", f"every host of the Ray cluster needs {config.REDIS_VARIABLE} in its environment")
        )
    sys.stdout.write(yaml.safe_dump(schema, sort_keys=False))


def doctor(as_json: bool, given: Mapping[str, Any]) -> bool:
    """Says what is wrong; returns whether nothing keeps a cluster from working."""
    wanted = settings(given).config()
    found = diagnose(doctor_facts.gather(wanted, config.environment()))
    if as_json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(found), indent=2).decode() + "\n")
    for finding in () if as_json else found:
        colour = "red" if finding.level == "error" else "yellow"
        said = f"[{colour}]{finding.level}[/{colour}] {finding.check}: {escape(finding.what)}"
        out.print(said, f"\n  {escape(finding.remedy)}", highlight=False, soft_wrap=True)
    if not found and not as_json:
        out.print("nothing is wrong that can be seen from here", highlight=False)
    return all(finding.level != "error" for finding in found)
