// A CUDA device that does nothing, for a build of torch without CUDA. FakeTensorMode computes on it
// once torch finds two things: hooks that report one device, and a guard that can switch to it.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <new>

namespace {

using c10::DeviceIndex;
using c10::DeviceType;

struct OneDeviceHooks final : at::CUDAHooksInterface {
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  int getNumGPUs() const override { return 1; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex current_device() const override { return 0; }
  DeviceIndex getCurrentDevice() const override { return 0; }
};

// NoOpDeviceGuardImpl answers with device -1, which autograd does not take for an index.
struct OneDeviceGuard final : c10::impl::NoOpDeviceGuardImpl<DeviceType::CUDA> {
  c10::Device device() const { return {DeviceType::CUDA, 0}; }
  c10::Stream stream() const { return c10::Stream(c10::Stream::DEFAULT, device()); }

  c10::Device getDevice() const override { return device(); }
  c10::Device exchangeDevice(c10::Device) const override { return device(); }
  c10::Stream getStream(c10::Device) const noexcept override { return stream(); }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return stream(); }
  // Autograd orders the streams of forward and backward by events.
  void record(void**, const c10::Stream&, DeviceIndex, c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
};

bool install() {
  // torch has made its hooks while it was imported, and keeps a reference to them. They have no
  // members, so ours can be constructed in their place.
  static_assert(sizeof(OneDeviceHooks) == sizeof(at::CUDAHooksInterface));
  auto& hooks = const_cast<at::CUDAHooksInterface&>(at::detail::getCUDAHooks());
  new (&hooks) OneDeviceHooks;
  if (!c10::impl::hasDeviceGuardImpl(DeviceType::CUDA)) {
    static OneDeviceGuard guard;
    c10::impl::DeviceGuardImplRegistrar registrar(DeviceType::CUDA, &guard);
  }
  return true;
}

const bool is_installed = install();

}  // namespace
