#pragma once

// c10d's header of its Gloo backend names types of Gloo, whose own headers no
// package of LibTorch brings along. These files declare the few names that it takes
// to read that header. Reprise makes no object of any of them: a transport device
// comes from c10d and goes back to it.
