// A small ge::AscendString: the string class in the calls of hixl::Hixl and adxl::AdxlEngine.
//
// Do not include it beside a header of the CANN toolkit that defines ge::AscendString.
#ifndef HIXL_ASCEND_STRING_H_
#define HIXL_ASCEND_STRING_H_

#include <cstddef>
#include <memory>
#include <string>

namespace ge {

// An immutable string. Copies share its bytes. It may contain null bytes.
class AscendString {
 public:
  AscendString() = default;

  // Null is the empty text.
  AscendString(const char *name)  // NOLINT: texts are given where an AscendString is expected
      : name_(name == nullptr ? nullptr : std::make_shared<std::string>(name)) {}

  AscendString(const char *name, size_t length)
      : name_(name == nullptr ? nullptr : std::make_shared<std::string>(name, length)) {}

  // Returns the bytes, with a null byte after them. They live as long as a copy of the text.
  const char *GetString() const { return name_ == nullptr ? "" : name_->c_str(); }

  size_t GetLength() const { return name_ == nullptr ? 0U : name_->size(); }

  bool operator<(const AscendString &other) const { return Compare(other) < 0; }
  bool operator>(const AscendString &other) const { return Compare(other) > 0; }
  bool operator<=(const AscendString &other) const { return Compare(other) <= 0; }
  bool operator>=(const AscendString &other) const { return Compare(other) >= 0; }
  bool operator==(const AscendString &other) const { return Compare(other) == 0; }
  bool operator!=(const AscendString &other) const { return Compare(other) != 0; }

 private:
  int Compare(const AscendString &other) const {
    const size_t common = GetLength() < other.GetLength() ? GetLength() : other.GetLength();
    const int order = std::char_traits<char>::compare(GetString(), other.GetString(), common);
    if (order != 0) {
      return order;
    }
    return GetLength() == other.GetLength() ? 0 : (GetLength() < other.GetLength() ? -1 : 1);
  }

  std::shared_ptr<std::string> name_;
};

}  // namespace ge

#endif  // HIXL_ASCEND_STRING_H_
