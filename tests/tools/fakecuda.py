# SPDX-License-Identifier: Apache-2.0
"""Generates Inductor's CUDA code on a machine without a GPU.

A mocked device and Triton driver let Inductor compile fake CUDA tensors, and autograd differentiate them. The generated
source is captured before it is loaded, and stubs that return fake outputs replace it, so that ``backward()`` compiles
the backward graph as well.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

without_a_gpu = pytest.mark.skipif(
    torch.cuda.is_available() or bool(torch.version.hip),
    reason="a real GPU runs test_gpu*.py, and a torch built for AMD GPUs asks for a driver where this mocks one",
)

H200 = types.SimpleNamespace(
    name="NVIDIA H200 (fake)", major=9, minor=0, multi_processor_count=132, total_memory=141 << 30,
    regs_per_multiprocessor=65536, max_threads_per_multi_processor=2048, max_threads_per_block=1024, warp_size=32,
    shared_memory_per_block_optin=232448, shared_memory_per_block=49152, shared_memory_per_multiprocessor=233472,
    L2_cache_size=60 << 20, gcnArchName="", is_integrated=False,
)  # fmt: skip


def _driver() -> Any:
    from triton.backends.compiler import GPUTarget
    from triton.backends.driver import DriverBase

    class Driver(DriverBase):
        def __init__(self): ...
        @classmethod
        def is_active(cls):
            return True

        def map_python_to_cpp_type(self, ty):
            return ty

        def get_current_target(self):
            return GPUTarget("cuda", 90, 32)

        def get_active_torch_device(self):
            return torch.device("cuda", 0)

        def get_current_device(self):
            return 0

        def get_current_stream(self, device=None):
            return 0

        def get_device_capability(self, device=0):
            return (9, 0)

        def get_benchmarker(self):
            return lambda *a, **k: 0.0

        def get_empty_cache_for_benchmark(self):
            raise RuntimeError("no device")

        def clear_cache(self, cache): ...

    return Driver()  # fmt: skip


_STREAMS = """
#include <utility>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
using namespace c10;
struct Guard : impl::NoOpDeviceGuardImpl<DeviceType::CUDA> {
    Device getDevice() const override { return Device(DeviceType::CUDA, 0); }
    Device exchangeDevice(Device) const override { return getDevice(); }
    Stream getStream(Device) const noexcept override { return Stream(Stream::DEFAULT, getDevice()); }
    Stream exchangeStream(Stream) const noexcept override { return getStream(getDevice()); }
    void record(void**, const Stream&, const DeviceIndex, const EventFlag) const override {}
    void block(void*, const Stream&) const override {}
} guard;
struct Hooks : at::CUDAHooksInterface {
    bool hasCUDA() const override { return true; }
    bool isBuilt() const override { return true; }
    bool isAvailable() const override { return true; }
    bool hasPrimaryContext(DeviceIndex) const override { return true; }
    long versionRuntimeCuDNN() const override { return 0; }  // scaled_dot_product_attention asks, in builds with CUDA
} hooks;
// The hooks have been made and handed out before, so their methods are exchanged, not the object.
const impl::DeviceGuardImplInterface* other = &guard;
extern "C" void exchange() {
    other = impl::device_guard_impl_registry[static_cast<size_t>(DeviceType::CUDA)].exchange(other);
    std::swap(*reinterpret_cast<void**>(const_cast<at::CUDAHooksInterface*>(&at::detail::getCUDAHooks())),
              *reinterpret_cast<void**>(&hooks));
}
"""
"""Gives torch one CUDA device with one stream, on which nothing happens: autograd asks for both."""


@functools.cache
def _streams() -> Any:
    """Returns the compiled library of :data:`_STREAMS`, whose ``exchange()`` adds the device or takes it away."""
    from mhc_inductor import compat

    for name in ("libc10.so", "libtorch_cpu.so"):  # loaded already: now their symbols can be found
        ctypes.CDLL(str(Path(torch.__file__).with_name("lib") / name), mode=ctypes.RTLD_GLOBAL)
    return compat.kernels.compiled_cpp(_STREAMS, [])


@contextlib.contextmanager
def _autograd() -> Iterator[None]:
    """Makes autograd run on fake CUDA tensors, in the calling thread: its own threads were counted at its first run."""
    streams = _streams()
    streams.exchange()
    try:
        with torch.autograd.set_multithreading_enabled(False):
            yield
    finally:
        streams.exchange()


class _OnCpu(TorchDispatchMode):
    """Makes tensors on the CPU, whatever device they are asked for."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(torch.device, lambda _: torch.device("cpu"), (args, kwargs or {}))
        return func(*args, **kwargs)


def _on_cpu(method: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        with _OnCpu():
            return method(*args)

    return run


@contextlib.contextmanager
def fake_cuda() -> Iterator[None]:
    """Makes torch and Inductor see one H200."""
    import triton
    from torch._dynamo.device_interface import CudaInterface
    from torch._inductor.fx_passes import fuse_attention, joint_graph, misc_patterns, pad_mm
    from torch._inductor.runtime.hints import DeviceProperties
    from torch._subclasses import fake_tensor

    from mhc_inductor.kernels import background

    with contextlib.ExitStack() as stack:

        def patch(*args: Any) -> None:
            stack.enter_context(mock.patch.object(*args))

        stack.enter_context(_autograd())
        driver = triton.runtime.driver
        before = getattr(driver, "_active", None)
        driver.set_active(_driver())
        stack.callback(lambda: setattr(driver, "_active", before))
        patch(fake_tensor, "init_gpu_context", lambda device: None)
        # Inductor's own pattern tables trace tensors on the real device.
        patch(fuse_attention, "_sfdp_init", lambda *a: None)
        patch(misc_patterns, "_misc_patterns_init", lambda *a: None)
        patch(pad_mm, "_pad_mm_init", lambda *a: None)
        # Folding computes uniform values, such as zeros, with real tensors of one element.
        folder = joint_graph.UniformValueConstantFolder
        patch(folder, "_add_peephole_patterns", _on_cpu(folder._add_peephole_patterns))
        patch(folder, "_deduce_value", _on_cpu(folder._deduce_value))
        answers = {
            "is_available": True, "device_count": 1, "current_device": 0, "get_device_properties": H200,
            "get_device_capability": (9, 0), "synchronize": None, "_lazy_init": None, "set_rng_state": None,
            "_exchange_device": 0, "_maybe_exchange_device": 0, "set_device": None, "is_current_stream_capturing": False,
        }  # fmt: skip
        for name, answer in answers.items():
            patch(torch.cuda, name, lambda *a, answer=answer, **k: answer)
        # Compiling Gluon kernels in the background takes seconds; test_background.py tests it.
        patch(background, "start", lambda *a: None)
        patch(torch.cuda, "get_rng_state", lambda *a, **k: torch.empty(0, dtype=torch.uint8))
        interface = {
            "is_available": True, "get_device_properties": H200, "get_compute_capability": 90, "current_device": 0,
            "raise_if_triton_unavailable": None,
        }  # fmt: skip
        for name, answer in interface.items():
            if hasattr(CudaInterface, name):
                patch(CudaInterface, name, staticmethod(lambda *a, answer=answer, **k: answer))
        import torch.utils._triton as triton_utils

        def clear() -> None:
            for fn in [DeviceProperties.create, *vars(triton_utils).values()]:
                if hasattr(fn, "cache_clear"):
                    fn.cache_clear()

        clear()
        stack.callback(clear)
        yield


def generated_code(run: Callable[[], Any]) -> list[str]:
    """Returns the wrapper sources generated by ``run``, which calls compiled functions on fake CUDA tensors."""
    from torch._inductor import ir
    from torch._inductor.graph import GraphLowering

    codes: list[str] = []

    def compile_to_module(self: Any) -> Any:
        code, _ = self.codegen()
        codes.append(code.value)
        sizevars = self.sizevars
        hint = getattr(sizevars, "optimization_hint", None) or sizevars.size_hint

        def describe(out: Any) -> Any:
            if isinstance(out, ir.NoneAsConstantBuffer):
                return None
            if isinstance(out, ir.ShapeAsConstantBuffer):
                return int(hint(out.expr))
            sizes, strides = ([int(hint(s)) for s in v] for v in (out.get_size(), out.get_stride()))
            return sizes, strides, out.get_dtype(), out.get_device()

        outs = [describe(o) for o in self.graph_outputs]

        def call(args: list[Any]) -> list[Any]:
            args.clear()
            return [
                torch.empty_strided(o[0], o[1], dtype=o[2], device=o[3]) if isinstance(o, tuple) else o for o in outs
            ]

        return types.SimpleNamespace(call=call)

    with mock.patch.object(GraphLowering, "compile_to_module", compile_to_module):
        torch._dynamo.reset()
        run()
    return codes
