// The kernels for AVX-512 with VNNI: products of 8 by 8 bits in fours.
#include "vnni.h"

#define FORM vnni
#include "kernels.h"
