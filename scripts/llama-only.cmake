# llama-cpp-python forces llama.cpp's "common" library (command-line helpers, an HTTP client) to be built;
# its Python side loads only libllama and libggml. Included by CMake after every project() call
# (CMAKE_PROJECT_INCLUDE), so it has the last word before llama.cpp reads the option.
if(PROJECT_NAME STREQUAL "llama.cpp")
    set(LLAMA_BUILD_COMMON OFF CACHE BOOL "llama.cpp: build common utils library" FORCE)
endif()
