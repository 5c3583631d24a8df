#include "device/numa.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <cctype>
#include <exception>
#include <fstream>
#include <string>

#include "device/cuda_driver.h"

namespace dcpx::device {
namespace {

constexpr int kMpolPreferred = 1;  // of <linux/mempolicy.h>, which not every machine has
constexpr int kMaxNodes = 1024;
constexpr int kWordBits = 8 * sizeof(unsigned long);

}  // namespace

int numa_node_of(int device) noexcept {
  try {
    const Api& api = Driver::get().api();
    Device handle = 0;
    std::array<char, 32> bus_id{};
    if (api.cuDeviceGet(&handle, device) != kSuccess ||
        api.cuDeviceGetPCIBusId(bus_id.data(), static_cast<int>(bus_id.size()) - 1, handle) !=
            kSuccess)
      return -1;
    std::string path = "/sys/bus/pci/devices/";
    for (const char* c = bus_id.data(); *c != '\0'; ++c)  // sysfs writes its digits small
      path += static_cast<char>(std::tolower(static_cast<unsigned char>(*c)));
    int node = -1;
    std::ifstream file(path + "/numa_node");
    if (!(file >> node)) return -1;
    return node;
  } catch (const std::exception&) {  // no driver: then no device is near anything
    return -1;
  }
}

bool prefer_node(void* data, std::uint64_t nbytes, int node) noexcept {
  if (node < 0 || node >= kMaxNodes || nbytes == 0) return false;
  std::array<unsigned long, kMaxNodes / kWordBits> mask{};
  mask[static_cast<std::size_t>(node / kWordBits)] = 1UL << (node % kWordBits);
  return ::syscall(SYS_mbind, data, nbytes, kMpolPreferred, mask.data(), kMaxNodes + 1, 0) == 0;
}

}  // namespace dcpx::device
