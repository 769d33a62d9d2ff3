"""`python -m kvtransfer.agent`: a rank's transfer agent."""

from kvtransfer.agent.agent import main

if __name__ == "__main__":
    main()
