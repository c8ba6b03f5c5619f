"""Lets SGLang start on a machine without a GPU. Python runs a module of this name at every start, children included.

SGLang 0.5.23 imports GPU packages at module level that it never calls on its torch path. `StandIns` serves them as
modules whose every attribute exists. Two pieces of its host KV pool do need a CPU form; `MENDS` puts it in when the
module is imported. Only `celld.sglang.launch` puts this folder on a path, and only for `device = "cpu"`.
"""

import importlib.abc
import importlib.machinery
import sys
import types

STAND_INS = ("torchvision", "sgl_kernel", "triton")


class _NamedMembers(type):
    """A class whose unknown attributes are strings: transformers reads members of enumerations that are not here."""

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return f"{cls.__name__}.{name}"


class _Anything(metaclass=_NamedMembers):
    """Called with one function it is a decorator that leaves the function alone; else it answers with itself."""

    def __init__(self, *_args, **_options):
        pass

    def __init_subclass__(cls, **_options):
        pass

    def __call__(self, *args, **options):
        return args[0] if len(args) == 1 and not options and callable(args[0]) else self

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return "cpu" if name == "backend" else _Anything()  # SGLang asks triton for its backend and uses the word

    def __class_getitem__(cls, _item):
        return cls


class _StandIn(types.ModuleType):
    __version__ = "0.0.0"

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        if (full := f"{self.__name__}.{name}") in sys.modules:
            return sys.modules[full]
        if not name[:1].isupper():
            return _Anything()
        made = _NamedMembers(name, (_Anything,), {"__module__": self.__name__})  # may be subclassed: one identity
        setattr(self, name, made)
        return made


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Answers for the packages of STAND_INS, whether or not real ones are installed."""

    def find_spec(self, name, _path=None, _target=None):
        if name.partition(".")[0] in STAND_INS:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return _StandIn(spec.name)

    def exec_module(self, module):
        module.__path__ = []


def _unpinned(module):
    """Pinned memory is CUDA's."""
    original = module.HostKVCache.__init__

    def init(self, *args, **options):
        options["pin_memory"] = False
        original(self, *args, **options)

    module.HostKVCache.__init__ = init


def _unregistered(module):
    module._cuda_host_register = lambda *_args, **_options: None


def _plain_copy(module):
    """The page copy that a CUDA kernel does: by layer, source slots to target slots."""

    def transfer_kv_direct(src_layers, dst_layers, src_indices, dst_indices, page_size):
        source, target = src_indices.long().cpu(), dst_indices.long().cpu()
        for have, want in zip(src_layers, dst_layers, strict=True):
            want[target] = have[source].to(want.dtype)

    module.transfer_kv_direct = transfer_kv_direct


POOL = "sglang.srt.mem_cache.pool_host."
MENDS = {POOL + "base": _unpinned, POOL + "common": _unregistered, POOL + "mha": _plain_copy}


class Mender(importlib.abc.MetaPathFinder):
    """Finds a module of MENDS as everyone else would and mends it once it has run."""

    def find_spec(self, name, path=None, target=None):
        if name not in MENDS:
            return None
        others = [finder for finder in sys.meta_path if not isinstance(finder, Mender | StandIns)]
        spec = next(filter(None, (finder.find_spec(name, path, target) for finder in others)), None)
        if spec is None or spec.loader is None:
            return None
        run = spec.loader.exec_module

        def run_and_mend(module):
            run(module)
            MENDS[name](module)

        spec.loader.exec_module = run_and_mend
        return spec


sys.meta_path[:0] = [Mender(), StandIns()]
