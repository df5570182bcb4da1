// The class adxl::AdxlEngine, the predecessor of hixl::Hixl, with the same rules.
#ifndef ADXL_ADXL_ENGINE_H_
#define ADXL_ADXL_ENGINE_H_

#include <cstddef>
#include <cstdlib>
#include <vector>

#include "adxl/adxl_types.h"
#include "hixl/hixl.h"

namespace adxl {

// An engine. New programs use hixl::Hixl.
class AdxlEngine : private hixl::Hixl {
 public:
  using Hixl::Initialize;
  using Hixl::Finalize;
  using Hixl::RegisterMem;
  using Hixl::DeregisterMem;
  using Hixl::Connect;
  using Hixl::Disconnect;
  using Hixl::TransferSync;
  using Hixl::SendNotify;
  using Hixl::GetNotifies;
  using Hixl::GetCapability;

  // Starts a transfer, and sets req to its request for GetTransferStatus, or to null after a failure. The call waits
  // only to connect, or to ask for a range that was not used before; after 1 s it returns TIMEOUT. Disconnect cancels
  // the request. The request fails when the other engine gives up, after 600 s.
  Status TransferAsync(const AscendString &remote_engine, TransferOp operation,
                       const std::vector<TransferOpDesc> &op_descs, const TransferArgs &, TransferReq &req) {
    return Hixl::TransferAsync(remote_engine, operation, op_descs, hixl::TransferArgs{}, req);
  }

  // Sets status to the state of a request. A final state is returned once; later calls return PARAM_INVALID.
  Status GetTransferStatus(const TransferReq &req, TransferStatus &status) {
    return Hixl::GetTransferStatus(req, status);
  }

  // Allocates host memory, whatever the type, at a page boundary. FreeMem frees it. It is not registered.
  static Status MallocMem(MemType, size_t size, void **ptr) {
    if (ptr == nullptr || size == 0U) {
      return PARAM_INVALID;
    }
    *ptr = nullptr;
    return posix_memalign(ptr, 4096U, size) == 0 ? SUCCESS : RESOURCE_EXHAUSTED;
  }

  // Frees memory of MallocMem, which must not be registered any more.
  static Status FreeMem(void *ptr) {
    if (ptr == nullptr) {
      return PARAM_INVALID;
    }
    std::free(ptr);
    return SUCCESS;
  }
};

}  // namespace adxl

#endif  // ADXL_ADXL_ENGINE_H_
