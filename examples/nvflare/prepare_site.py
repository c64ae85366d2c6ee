"""Restrict a startup kit of NVFlare to the courier: python prepare_site.py KIT, at the server and at every client.

Jobs may then have no code of their own and name no class but the courier's, which is copied into KIT/local/custom; logs
stay at the site, and the server keeps its jobs in KIT, and not in /tmp. What ends in ".default" is left as it is.
"""

import json
import shutil
import sys
from pathlib import Path

COURIER = Path(__file__).parent / "silodp_courier"


def prepare(kit: Path) -> None:
    """Copy the courier, and write the policies of a site."""
    local = kit / "local"
    shutil.copytree(
        COURIER,
        local / "custom" / COURIER.name,
        ignore=shutil.ignore_patterns("__pycache__"),
        dirs_exist_ok=True,
    )
    # In /tmp any user of the machine could make these folders first.
    resources = json.loads(_read(local / "resources.json").replace('"/tmp/nvflare/', f'"{kit}/storage/'))
    resources.update(class_allow_list=[f"{COURIER.name}."], allow_log_streaming=False)
    policy = json.loads(_read(local / "authorization.json"))
    roles = policy["permissions"]
    for role, rights in roles.items():
        # A role may have one word for all rights.
        named = rights if isinstance(rights, dict) else dict.fromkeys(roles["lead"], rights)
        roles[role] = {**named, "byoc": "none"}
    for name, content in (("resources.json", resources), ("authorization.json", policy)):
        (local / name).write_text(json.dumps(content, indent=2) + "\n")


def _read(path: Path) -> str:
    """Return a file of the site, or what it was provisioned with."""
    return (path if path.exists() else path.with_name(f"{path.name}.default")).read_text()


prepare(Path(sys.argv[1]).resolve())
