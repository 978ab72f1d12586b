"""How a sandbox runs a Python program out of a venv that was made elsewhere.

A venv knows its interpreter, and its scripts the venv, by absolute paths of this machine; in a sandbox the venv lies at
/polar/<preset>, and an interpreter outside of the system's folders at /polar/python. So the interpreter is started by
itself and given the venv's packages. ``-I`` keeps the work folder and PYTHON… variables from its imports, and nothing
of this reaches the commands that the program runs.
"""

from __future__ import annotations

from pathlib import Path

from polar.harnesses.packages import Located, PipPackage, executable, folder
from polar.runtimes.bubblewrap import PATH, SYSTEM
from polar.runtimes.runtime import Mount

START = (
    "import os, runpy, site, sys; os.environ.pop('LD_LIBRARY_PATH', None); site.addsitedir(sys.argv[1]); "
    "module = sys.argv[2]; del sys.argv[:2]; runpy.run_module(module, run_name='__main__', alter_sys=True)"
)
PYTHON = "/polar/python"


def located_module(name: str, package: PipPackage) -> Located:
    """How a sandbox runs the module of ``package``. Raises HarnessError unless the pinned version is installed."""
    place, interpreter = folder(name), executable(name, package).resolve()
    packages = next(place.glob("lib/python3*/site-packages"))
    mounts = [Mount(place, f"/polar/{name}")]
    argv, base = [str(interpreter)], interpreter.parent.parent
    if not any(base.is_relative_to(Path(system)) for system in SYSTEM):
        mounts.append(Mount(base, PYTHON))
        argv = [f"{PYTHON}/bin/{interpreter.name}"]
        if any((base / "lib").glob("libpython*.so*")):
            argv = ["env", f"LD_LIBRARY_PATH={PYTHON}/lib", *argv]
    inside = f"/polar/{name}/{packages.relative_to(place)}"
    return Located(argv=[*argv, "-I", "-c", START, inside, package.module], path=PATH, mounts=mounts)
