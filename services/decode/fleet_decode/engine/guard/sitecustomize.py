"""Start-up guard of the decode processes: on PYTHONPATH, so that every child of vLLM runs it too.

WHY   1. vLLM's vision-language models import torchvision at module level. The only torchvision on PyPI is linked
         against CUDA torch: beside a CPU build of torch `import torchvision` fails ("operator torchvision::nms does
         not exist", raised by its module `_meta_registrations` alone), so installations for CPUs leave it out.
         Decode runs no torchvision operator (it gets embeddings): with a CPU torch the one module is left empty where
         torchvision is installed, and where it is not, stand-ins without function take its place.
      2. vLLM's engine core outlives a frontend that was killed (`kill -9` leaves it no time to tell): a process
         that multiprocessing started asks the kernel to die with its parent.
SCOPE Processes whose PYTHONPATH names this folder (`fleet_decode.engine.environment`); nothing is patched in vLLM.
GONE  1. when PyPI has a torchvision for the CPU build of torch, or vLLM imports torchvision lazily;
      2. when vLLM's engine core watches its parent.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

_PACKAGE = "torchvision"
_UNUSABLE = "torchvision._meta_registrations"
_PR_SET_PDEATHSIG = 1
_SIGKILL = 9


class _StandInType(type):
    """A class whose every attribute is another stand-in: enough for names that are imported and never used."""

    def __getattr__(cls, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return _StandInType(name, (), {})


class _StandInModule(ModuleType):
    """A module whose every attribute is a stand-in."""

    __version__ = "0"

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return _StandInType(name, (), {})


class _StandInLoader(importlib.abc.Loader):
    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _StandInModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing to run."""


class _TorchvisionFinder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] != _PACKAGE or _torch_is_for_gpus():
            return None
        if fullname != _UNUSABLE and importlib.machinery.PathFinder.find_spec(_PACKAGE) is not None:
            return None
        return importlib.machinery.ModuleSpec(fullname, _StandInLoader(), is_package=True)


def _torch_is_for_gpus() -> bool:
    """By the build's own version file: importing torch here would cost every process seconds."""
    torch = importlib.machinery.PathFinder.find_spec("torch")
    if torch is None or torch.origin is None:
        return False
    version = importlib.util.spec_from_file_location("_torch_version", Path(torch.origin).with_name("version.py"))
    if version is None or version.loader is None:
        return False
    module = importlib.util.module_from_spec(version)
    version.loader.exec_module(module)
    return module.cuda is not None or module.hip is not None


def _die_with_parent() -> None:
    if sys.platform != "linux" or "--multiprocessing-fork" not in sys.orig_argv:
        return
    import ctypes

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, _SIGKILL, 0, 0, 0)


def _run_next_sitecustomize() -> None:
    """Python runs only the first `sitecustomize` on the path: run the one this file hides."""
    here = Path(__file__).resolve().parent
    others = [entry for entry in sys.path if entry and Path(entry).resolve() != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


sys.meta_path.insert(0, _TorchvisionFinder())
_die_with_parent()
_run_next_sitecustomize()
