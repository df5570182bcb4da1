/* The `main` of a fuzz target that is linked without libFuzzer: calls the target once with the bytes of each file. */
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t length);
int LLVMFuzzerInitialize(int *count, char ***arguments);

int main(int count, char **arguments) {
  LLVMFuzzerInitialize(&count, &arguments);
  for (int number = 1; number < count; number++) {
    FILE *file = fopen(arguments[number], "rb");
    if (file == NULL || fseek(file, 0, SEEK_END) != 0) {
      perror(arguments[number]);
      return 1;
    }
    long length = ftell(file);
    rewind(file);
    uint8_t *bytes = malloc((size_t)length + 1);
    if (bytes == NULL || fread(bytes, 1, (size_t)length, file) != (size_t)length) {
      perror(arguments[number]);
      return 1;
    }
    fclose(file);
    LLVMFuzzerTestOneInput(bytes, (size_t)length);
    free(bytes);
  }
  return 0;
}
