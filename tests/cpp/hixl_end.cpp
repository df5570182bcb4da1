// One object of hixl::Hixl and its memory, controlled by commands on standard input.
//
// Each line is a command and its arguments, with texts and bytes in hexadecimal. The answer is one line: the status in
// decimal, and the results. Not for: checking results (tests/test_hixl_cpp.py does).
#include <cstdlib>
#include <iostream>
#include <sstream>
#include <string>

#include "hixl/hixl.h"

using namespace hixl;

namespace {

constexpr const char *kDigits = "0123456789abcdef";

template <typename T>
T Next(std::istringstream &words) {
  T value{};
  words >> value;
  return value;
}

// A text in hexadecimal, after a point, so that the empty one is a word.
std::string Bytes(std::istringstream &words) {
  const auto word = Next<std::string>(words);
  std::string bytes;
  for (size_t i = 1; i + 1 < word.size(); i += 2) {
    bytes.push_back(static_cast<char>(std::stoi(word.substr(i, 2), nullptr, 16)));
  }
  return bytes;
}

AscendString Text(std::istringstream &words) {
  const std::string bytes = Bytes(words);
  return {bytes.data(), bytes.size()};
}

std::string Shown(const char *bytes, size_t size) {
  std::string word = ".";
  for (size_t i = 0; i < size; ++i) {
    const auto byte = static_cast<unsigned char>(bytes[i]);
    word.push_back(kDigits[byte >> 4U]);
    word.push_back(kDigits[byte & 15U]);
  }
  return word;
}

std::string Shown(const AscendString &text) { return Shown(text.GetString(), text.GetLength()); }

std::vector<TransferOpDesc> Ops(std::istringstream &words) {
  std::vector<TransferOpDesc> ops(Next<size_t>(words));
  for (auto &op : ops) {
    words >> op.local_addr >> op.remote_addr >> op.len;
  }
  return ops;
}

class End {
 public:
  Status Run(const std::string &command, std::istringstream &words, std::ostringstream &said) {
    if (command == "initialize") {
      const AscendString address = Text(words);
      std::map<AscendString, AscendString> options;
      for (auto left = Next<size_t>(words); left > 0; --left) {
        const AscendString key = Text(words);
        options[key] = Text(words);
      }
      return engine_.Initialize(address, options);
    }
    if (command == "finalize") {
      engine_.Finalize();
      return SUCCESS;
    }
    if (command == "add") {
      const auto name = Next<std::string>(words);
      memory_[name] = Bytes(words);
      said << " " << reinterpret_cast<uintptr_t>(&memory_[name][0]);
      return SUCCESS;
    }
    if (command == "bytes") {
      const std::string &bytes = memory_.at(Next<std::string>(words));
      said << " " << Shown(bytes.data(), bytes.size());
      return SUCCESS;
    }
    if (command == "register") {
      MemDesc desc{};
      words >> desc.addr >> desc.len;
      const auto type = Next<int>(words) == 0 ? MEM_DEVICE : MEM_HOST;
      desc.local_only = Next<int>(words) != 0;
      MemHandle handle = nullptr;
      const Status status = engine_.RegisterMem(desc, type, handle);
      said << " " << view::Number(handle);
      return status;
    }
    if (command == "deregister") {
      return engine_.DeregisterMem(view::Pointer(Next<uint64_t>(words)));
    }
    if (command == "notifies") {
      std::vector<NotifyDesc> notifies;
      const Status status = engine_.GetNotifies(notifies);
      for (const auto &notify : notifies) {
        said << " " << Shown(notify.name) << " " << Shown(notify.notify_msg);
      }
      return status;
    }
    if (command == "state") {
      auto state = TransferStatus::WAITING;
      const Status status = engine_.GetTransferStatus(view::Pointer(Next<uint64_t>(words)), state);
      said << " " << static_cast<int>(state);
      return status;
    }
    return AboutRemote(command, Text(words), words, said);
  }

 private:
  Status AboutRemote(const std::string &command, const AscendString &remote, std::istringstream &words,
                     std::ostringstream &said) {
    if (command == "connect") {
      return engine_.Connect(remote, Next<int32_t>(words));
    }
    if (command == "disconnect") {
      return engine_.Disconnect(remote, Next<int32_t>(words));
    }
    if (command == "notify") {
      const NotifyDesc notify{Text(words), Text(words)};
      return engine_.SendNotify(remote, notify, Next<int32_t>(words));
    }
    const TransferOp operation = Next<int>(words) == 0 ? READ : WRITE;
    if (command == "move") {
      const auto limit = Next<int32_t>(words);
      return engine_.TransferSync(remote, operation, Ops(words), limit);
    }
    if (command == "submit") {
      TransferReq request = nullptr;
      const Status status = engine_.TransferAsync(remote, operation, Ops(words), TransferArgs{}, request);
      said << " " << view::Number(request);
      return status;
    }
    std::cerr << "no command: " << command << std::endl;
    std::exit(2);
  }

  std::map<std::string, std::string> memory_;
  Hixl engine_;
};

}  // namespace

int main() {
  End end;
  std::string line;
  while (std::getline(std::cin, line)) {
    std::istringstream words(line);
    std::ostringstream said;
    const auto command = Next<std::string>(words);
    const Status status = end.Run(command, words, said);
    std::cout << status << said.str() << std::endl;
  }
  return 0;
}
