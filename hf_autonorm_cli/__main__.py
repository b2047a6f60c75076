from hf_autonorm_cli import main

main()
