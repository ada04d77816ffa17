"""Where seqcomp meets other libraries, and the checks that span plan and model."""
